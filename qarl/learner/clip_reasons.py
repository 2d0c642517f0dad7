"""The reasons why a token counted for less in an update.

Imports nothing, so that reading a reason's name costs nothing.
"""

import itertools

CLIP_REASONS = (
    "none",
    *(
        f"{kind}A {sign} 0 {side}"
        for kind, sign, side in itertools.product(("", "sequence, "), "><", ("above", "below"))
    ),
    "corrected",
)
"""Names of the reasons, by the index in `LossTokens.clip`. A clip says whether the ratio of the
token or of its sequence reached the objective's bound, above or below 1, and the advantage's
sign. `corrected`: the token was not clipped, but its mismatch weight was capped or masked.
"""
