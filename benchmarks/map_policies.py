"""Policies of docs/lab/map.md: running totals with other answer lengths and other weight outliers.

    python -m benchmarks.map_policies FOLDER

It takes about twenty minutes of a core and prints each policy's folder.
"""

import dataclasses
import sys
from pathlib import Path

from qarl.embedded.recipe import RECIPES, TinyRecipe, ensure_recipe

_LONG = RECIPES["tiny-qwen3-long"]
POLICIES = {
    "outliers-1": dataclasses.replace(_LONG, outliers=1.0),
    "outliers-2": dataclasses.replace(_LONG, outliers=2.0),
    "outliers-3": dataclasses.replace(_LONG, outliers=3.0),
    "outliers-8": dataclasses.replace(_LONG, outliers=8.0),
    "terms-5": dataclasses.replace(_LONG, task_options={"min_terms": 5, "max_terms": 5}),
    "terms-40": dataclasses.replace(_LONG, task_options={"min_terms": 40, "max_terms": 40}),
    "width-256": dataclasses.replace(
        _LONG, hidden_size=256, intermediate_size=512, num_hidden_layers=4, head_dim=64
    ),
}
"""Recipes by name.

`tiny-qwen3-long` itself has an outlier factor of 4 and answers of 16 terms, about 110 tokens. Five
terms are about 27 tokens, 40 terms about 290. `width-256` has 2.5 million parameters instead of
0.36 million.
"""


def map_policies(folder: Path, policies: dict[str, TinyRecipe]) -> list[Path]:
    """Build each policy that `folder` lacks, and link it there by its name."""
    links = []
    for name, recipe in policies.items():
        link = folder / name
        if not link.exists():
            link.symlink_to(ensure_recipe(f"map-{name}", recipe, folder / "built").resolve())
        links.append(link)
    return links


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    for path in map_policies(target, POLICIES):
        sys.stdout.write(f"{path}\n")
