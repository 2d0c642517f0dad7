"""A small copy of the suite `math`: a few rows as each data set has them."""

import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow
from pyarrow import parquet

ROWS: dict[str, list[dict[str, Any]]] = {
    "aime24": [{"id": 60, "problem": "Find $x$ if $2x = 408$.", "solution": "…", "answer": "204", "year": "2024"},
               {"id": 61, "problem": "How many minutes?", "solution": "…", "answer": "025", "year": "2024"}],
    "aime25": [{"problem": "Find the sum of all integer bases.", "answer": "70", "id": "0"}],
    "amc23": [{"id": 0, "question": "Find $a+b$.", "answer": 27.0, "url": "…"}],
    "math500": [{"problem": "Convert $(0,3)$.", "solution": "…", "subject": "Precalculus", "level": 2,
                 "answer": "\\left( 3, \\frac{\\pi}{2} \\right)", "unique_id": "test/precalculus/807.json"}],
    "minerva": [{"question": "At what energy? Answer in eV.", "answer": "13.6"}],
    "olympiadbench": [{"id": 1606, "question": "Find $T$.", "solution": ["…"], "final_answer": ["$\\frac{1}{2}$"],
                       "is_multiple_answer": False, "answer_type": "Numerical", "context": None}],
}  # fmt: skip
"""A few rows as each data set has them."""
RIGHT = {"aime24": "204", "aime25": "70", "amc23": "27", "math500": "(3, \\frac{\\pi}{2})", "minerva": "13.6",
         "olympiadbench": "0.5"}  # fmt: skip


def write_copies(folder: Path) -> Path:
    """A local copy of the suite: files of three kinds, what `hf download` leaves, and what `save_to_disk` does."""
    folder.mkdir(exist_ok=True)
    for name, rows in ROWS.items():
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        if name == "aime25":
            parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "aime25.parquet")
        elif name == "minerva":
            (folder / "minerva.csv").write_text('question,answer\n"At what energy? Answer in eV.",13.6\n')
        elif name == "math500":
            (folder / name).mkdir()
            (folder / name / "test.jsonl").write_text(lines)
        elif name == "olympiadbench":
            datasets.DatasetDict({"test": datasets.Dataset.from_list(rows)}).save_to_disk(folder / name)
        else:
            (folder / f"{name}.jsonl").write_text(lines)
    return folder
