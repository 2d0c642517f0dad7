"""Draw the pictures of docs from benchmark records: python scripts/docs_plots.py

docs/NAME.svg is drawn of benchmarks/records/RECORD.json, which `qarl bench schemes --json` wrote.
"""

import json
import shutil
import tempfile
from pathlib import Path

from qarl.bench.schemes.plot import plot
from qarl.bench.schemes.table import from_data

ROOT = Path(__file__).resolve().parents[1]
PICTURES = {
    "results-short": "schemes-default",
    "results-objectives": "schemes-objectives",
    "results-long": "schemes-long-kept-both",
}
"""NAME → RECORD."""


def main() -> None:
    """Draw every picture anew."""
    for name, record in PICTURES.items():
        data = json.loads((ROOT / "benchmarks" / "records" / f"{record}.json").read_text(encoding="utf-8"))["data"]
        with tempfile.TemporaryDirectory() as folder:
            svg, _ = plot(from_data(data), Path(folder) / name)
            shutil.move(svg, ROOT / "docs" / svg.name)


if __name__ == "__main__":
    main()
