"""The house: imports go one way, the loop stays on a page, configuration stays light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("quant", "rollout", "learner", "sync", "qarl")
MAY_IMPORT = {
    "quant": {"configs.schema.run", "configs.schema.lora"},
    "rollout": {"configs.schema.run", "quant"},
    "learner": {"configs.schema.run", "configs.schema.learner", "configs.schema.objectives", "quant", "rollout.types"},
    "sync": {"configs.schema.run", "quant", "rollout", "learner"},
}


def imports(file: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{file}: relative import"
            found.add(node.module)
    return {name for name in found if name.split(".")[0] in ROOMS}


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_imports_follow_the_arrows(room: str):
    allowed = MAY_IMPORT[room] | {room}
    for file in (ROOT / room).rglob("*.py"):
        for name in imports(file):
            assert any(name == a or name.startswith(a + ".") for a in allowed), f"{file} imports {name}"


def test_the_loop_fits_a_page():
    tree = ast.parse((ROOT / "qarl" / "train.py").read_text())
    lengths = {
        n.name: n.end_lineno - n.lineno for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.end_lineno
    }
    assert max(lengths.values()) < 60, lengths


def test_configuration_imports_neither_torch_nor_vllm():
    code = (
        "import sys, qarl.config, qarl.shipped; "
        "print([m for m in ('torch', 'vllm', 'transformers') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert out.stdout.strip() == "[]"


def test_only_schemes_state_bits_and_ranges():
    """Outside quant/, no code names a bit width, a group size or a rounding range."""
    for room in ("rollout", "learner", "sync"):
        for file in (ROOT / room).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Constant) and node.value in (127, 127.5, 7.5, 448, 448.0):
                    raise AssertionError(f"{file}:{node.lineno} states {node.value}")
