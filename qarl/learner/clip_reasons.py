"""Why a token counted for less in an update. Imports nothing, so that naming a reason costs
nothing.
"""

from itertools import product

CLIP_REASONS = (
    "none",
    *(
        f"{of}A {sign} 0 {side}"
        for of, sign, side in product(("", "sequence, "), "><", ("above", "below"))
    ),
    "corrected",
)
"""Its ratio, or its sequence's, reached the objective's bound above or below 1, by the advantage's
sign; else its mismatch weight was capped or masked (`corrected`).
"""
