"""The notebooks of examples/notebooks run at a small size, and their stored outputs are of them.

Blind spot: the stored outputs are of the whole notebooks, which no test runs.
"""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from qarl.tasks import Response
from tests.support.imports import import_libraries

NOTEBOOKS = Path(__file__).parents[2] / "examples/notebooks"


def code_of(name: str) -> list[dict[str, Any]]:
    """Return a notebook's cells of code."""
    cells = json.loads((NOTEBOOKS / f"{name}.ipynb").read_text())["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def executed(
    name: str,
    small: str,
    monkeypatch: pytest.MonkeyPatch,
) -> dict[str, Any]:
    """Return the names that a notebook's cells define, while an event loop runs, as in Jupyter.

    small: the line that replaces the one with the sizes, which begins with the same names.
    """
    import_libraries()
    monkeypatch.setenv("MPLBACKEND", "agg")
    lines = [line for cell in code_of(name) for line in [*"".join(cell["source"]).split("\n"), ""]]
    (sizes,) = [index for index, line in enumerate(lines) if line.startswith("STEPS, ")]
    assert lines[sizes].split(" = ")[0] == small.split(" = ")[0]
    lines[sizes] = small
    names: dict[str, Any] = {}

    async def cells() -> None:
        exec(compile("\n".join(lines), name, "exec"), names)

    asyncio.run(cells())
    return names


def stored_text(name: str) -> str:
    """Return the text of a notebook's stored outputs, which must have a picture and no error."""
    outputs = [output for cell in code_of(name) for output in cell["outputs"]]
    assert any("image/png" in output.get("data", ()) for output in outputs)
    assert {output["output_type"] for output in outputs} == {"stream", "display_data"}
    return "".join("".join(output.get("text", "")) for output in outputs)


@pytest.mark.slow
def test_the_first_run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    names = executed("first_run", "STEPS, PROMPTS, SAMPLES = 3, 8, 8", monkeypatch)
    assert len(names["rewards"]) == 3
    assert set(names["equal"]) == {1.0}
    text = stored_text("first_run")
    assert text.splitlines()[0] in capsys.readouterr().out
    assert "equal in every step: True" in text


@pytest.mark.slow
def test_an_own_task(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """Check that the export's accuracy is found again, by the notebook's own reward."""
    small = "STEPS, PROMPTS, SAMPLES, HELD_OUT = 2, 8, 4, 16"
    names = executed("own_task", small, monkeypatch)
    problem = names["problem"]
    texts = [problem.answer, f"9{problem.answer[1:]}", "many", f"1{problem.answer}"]
    responses = [Response(problem, text) for text in texts]
    assert names["task"].rewards(responses) == pytest.approx([1, 2 / 3, 0, 0])
    assert [line["step"] for line in names["steps"]] == [1, 2]
    text = stored_text("own_task")
    assert "the same accuracy again: True" in text
    assert "the same accuracy again: True" in capsys.readouterr().out


@pytest.mark.slow
def test_trls_trainer(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("trl", reason="an optional extra, in the CPU lock alone")
    names = executed("trl", "STEPS, PROMPTS, SAMPLES, UPDATES = 2, 8, 4, 2", monkeypatch)
    assert names["difference"] == 0
    assert len(names["rewards"]) == 2
    for text in (stored_text("trl"), capsys.readouterr().out):
        assert "in any step: 0.0" in text
        assert "the export has the engine's tensors: True" in text
