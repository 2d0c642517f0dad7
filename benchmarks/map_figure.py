"""Draw docs/lab/map.svg: deployed accuracy over nats per answer, from the table of docs/lab/map.md.

python -m benchmarks.map_figure
"""

from pathlib import Path

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot

_PAGE = Path(__file__).resolve().parents[1] / "docs/lab/map.md"
_LINES = {
    "plain, GRPO with token-TIS": 4,
    "the same, by GPTQ afterwards": 5,
    "QaRL, GRPO": 6,
}
"""Label of each line and its column in the table; nats are in column 3."""


def rows(page: str) -> list[list[str]]:
    """Return the cells of the table whose fourth column is nats, line by line in order of nats."""
    tables = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in page.splitlines()
        if line.startswith("|")
    ]
    start = next(index for index, cells in enumerate(tables) if "nats" in cells)
    width = len(tables[start])
    # the line after the header separates it from the rows
    rows_of_table = [cells for cells in tables[start + 2 :] if len(cells) == width]
    return sorted(rows_of_table, key=lambda cells: float(cells[3]))


def draw(page: str, file: Path) -> None:
    """Write the figure."""
    cells = rows(page)
    nats = [float(row[3]) for row in cells]
    matplotlib.rcParams.update({"svg.hashsalt": "qarl", "font.size": 9})
    figure, axes = pyplot.subplots(figsize=(7.2, 3.4))
    for (label, column), marker in zip(_LINES.items(), "osD", strict=True):
        points = [
            (x, float(row[column])) for x, row in zip(nats, cells, strict=True) if row[column]
        ]
        axes.plot(*zip(*points, strict=True), marker, label=label, markersize=5)
    axes.set(
        xscale="log",
        xlabel="nats an answer between a plain learner and its sampler, before training",
    )
    axes.set(ylabel="deployed accuracy, %", ylim=(0, 102))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower left")
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})


if __name__ == "__main__":
    draw(_PAGE.read_text(encoding="utf-8"), _PAGE.with_suffix(".svg"))
