"""The house: imports go one way, the loop stays on a page, configuration stays light; and QaRL
works in a folder whose own packages are called as its rooms are.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

ROOT = Path(__file__).parent.parent
MAY_IMPORT = {
    "configs": set[str](),
    "quant": {"configs"},
    "rollout": {"configs", "quant"},
    "learner": {"configs", "quant", "rollout.types"},
    "sync": {"configs", "quant", "rollout.engine", "rollout.types", "learner"},
    "qarl": {"configs", "quant", "rollout", "learner", "sync"},
}
ROOMS = tuple(MAY_IMPORT)
FILES = {
    ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file
    for file in (ROOT / "qarl").rglob("*.py")
}


Node = TypeVar("Node", bound=ast.AST)


def nodes(
    kind: type[Node] | tuple[type[Node], ...], files: Iterable[Path] = ()
) -> Iterator[tuple[Path, Node]]:
    """Return every node of a kind in these files, or in all of the project's, with its file."""
    for file in files or FILES.values():
        yield from (
            (file, node) for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, kind)
        )


def imports(file: Path) -> set[str]:
    """Return the project's modules that a file imports anywhere. `from folder import module` counts
    as the module's import.
    """
    modules = {alias.name for _, node in nodes(ast.Import, [file]) for alias in node.names}
    for _, node in nodes(ast.ImportFrom, [file]):
        assert node.module and node.level == 0, f"{file}: relative import"
        names = {f"{node.module}.{alias.name}" for alias in node.names}
        modules |= {name if name in FILES else node.module for name in names}
    return modules & FILES.keys()


# which imports everything
@pytest.mark.parametrize("room", [room for room in ROOMS if room != "qarl"])
def test_imports_follow_the_arrows(room: str):
    allowed = {f"qarl.{name}" for name in MAY_IMPORT[room] | {room}}
    for file in (ROOT / "qarl" / room).rglob("*.py"):
        for name in imports(file):
            assert any(name == a or name.startswith(a + ".") for a in allowed), (
                f"{file} imports {name}"
            )


def test_the_rooms_are_one_package():
    """The rooms lie in `qarl/`, short paths are links. `quant` alone is never imported: it may be
    anybody's package.
    """
    rooms = [room for room in ROOMS if room != "qarl"]
    for room in rooms:
        assert (ROOT / room).readlink() == Path("qarl") / room
    top = re.compile(rf"^\s*(from|import) ({'|'.join(rooms)})\b", re.MULTILINE)
    for file in [
        *FILES.values(),
        *(ROOT / "tests").rglob("*.py"),
        *(ROOT / "scripts").rglob("*.py"),
    ]:
        assert not top.search(file.read_text()), file


def modules() -> dict[str, set[str]]:
    """Map every module of the project to those it imports anywhere in its file."""
    return {name: imports(file) for name, file in FILES.items()}


def folder(module: str) -> str:
    """Return the folder of a module: `quant.kernels` for `qarl.quant.kernels.vllm`. Files at the
    top of a room are rooms of their own (`quant.schemes`).
    """
    parts = module.split(".")
    if parts[1:2] and parts[1] in ROOMS:
        parts = parts[1:]
    return ".".join(parts[:2])


def circle(arrows: dict[str, set[str]]) -> list[str]:
    """Return one circle among the arrows, its first name repeated at the end, or an empty result if
    there is none.
    """
    done: set[str] = set()

    def walk(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        for other in sorted(arrows.get(name, ())):
            if found := walk(other, [*path, name]):
                return found
        done.add(name)
        return []

    return next(
        (found for name in sorted(arrows) if (found := walk(name, []))),
        [],
    )


def test_no_module_and_no_room_imports_in_a_circle():
    """Folders of quant, learner and qarl among each other: one way too."""
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"a"}}) == ["a", "b", "c", "a"]
    assert circle(modules()) == []
    arrows: dict[str, set[str]] = {}
    for name, used in modules().items():
        arrows.setdefault(folder(name), set()).update(folder(other) for other in used)
    assert circle({name: used - {name} for name, used in arrows.items()}) == []


def test_records_are_built_by_name():
    """A record of five fields or more is filled by their names: one more in the middle moves no
    value to another.
    """
    classes = [node for _, node in nodes(ast.ClassDef)]
    records = {
        c.name for c in classes if any("dataclass" in ast.unparse(d) for d in c.decorator_list)
    }
    for file, node in nodes(ast.Call):
        if isinstance(node.func, ast.Name) and node.func.id in records:
            starred = any(isinstance(argument, ast.Starred) for argument in node.args)
            assert len(node.args) < 5 or starred, f"{file}:{node.lineno} {node.func.id}"


def test_the_loop_fits_a_page():
    """The whole file is read in one sitting, and no function of it is longer than 60 lines."""
    loop = ROOT / "qarl" / "loop.py"
    assert len(loop.read_text().splitlines()) <= 160
    for _, node in nodes(ast.FunctionDef, [loop]):
        assert node.end_lineno is not None
        assert node.end_lineno - node.lineno < 60, node.name


@pytest.mark.parametrize("module", ["configs.load", "rollout.open", "quant.types"])
def test_what_is_light_imports_neither_torch_nor_vllm(module: str):
    """Configuration, the engine protocol, and what quant hands over."""
    code = (
        f"import sys, qarl.{module}; print([m for m in ('torch', 'vllm', 'transformers') if m in"
        " sys.modules])"
    )
    out = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    assert out.stdout.strip() == "[]"


RANGES = (127, 127.5, 7.5, 448)
"""Rounding ranges of int8, int4 and e4m3. 4, 8 and 128 are also counts of other things, so those
are looked for where they are compared with a scheme's fields.
"""
SCHEME_FIELDS = {"num_bits", "bits", "group_size", "block"}


def test_only_schemes_state_bits_and_ranges():
    """Outside quant/ no code states a rounding range, nor decides by a bit width or a group size:
    schemes are asked.
    """
    # the baseline has its methods' own conditions
    apart = ("qarl.quant", "qarl.configs", "qarl.ptq")
    files = [file for name, file in FILES.items() if not name.startswith(apart)]
    for file, node in nodes(ast.Constant, files):
        tokens = file == FILES["qarl.run.evaluation_plan"] and node.value == 448
        assert tokens or node.value not in RANGES, f"{file}:{node.lineno} states {node.value}"
    for file, node in nodes(ast.Compare, files):
        sides = [node.left, *node.comparators]
        fields = {side.attr for side in sides if isinstance(side, ast.Attribute)} & SCHEME_FIELDS
        stated = [
            side.value
            for side in sides
            if isinstance(side, ast.Constant) and side.value is not None
        ]
        assert not (fields and stated), f"{file}:{node.lineno} compares {fields} with {stated}"


def test_one_door_leads_to_engines():
    """Outside rollout/ nothing names a kind of engine: what samples is a `SamplingEngine`, got from
    `open_engine`. So another kind is a file of its own and a line in `rollout/open.py`.
    """
    for name, used in modules().items():
        if not name.startswith("qarl.rollout."):
            assert not {other for other in used if other.startswith("qarl.rollout.vllm")}, name
            assert "VllmEngine" not in FILES[name].read_text(), name
    callers = {name for name, used in modules().items() if "qarl.rollout.open" in used}
    assert callers
    assert all(folder(name).startswith("qarl") for name in callers)


def test_no_test_imports_a_test():
    """Code that tests share is in tests/support, which imports none of them either."""
    for file, node in nodes(
        (ast.Import, ast.ImportFrom),
        (ROOT / "tests").rglob("*.py"),
    ):
        for name in (f"{getattr(node, 'module', '')}.{alias.name}" for alias in node.names):
            assert not any(part.startswith("test_") for part in name.split(".")), (
                f"{file} imports {name}"
            )


def test_locals_are_named_for_what_they_hold():
    """No local, parameter or field is called `found`, `given` and the like: the name says what it
    is.
    """
    vague = {"found", "given", "made", "told", "asked", "wide", "held"}
    for file, node in nodes(ast.Name):
        assert not isinstance(node.ctx, ast.Store) or node.id not in vague, (
            f"{file}:{node.lineno}: {node.id}"
        )
    for file, node in nodes(ast.arg):
        assert node.arg not in vague, f"{file}:{node.lineno}: {node.arg}"


OF_LIBRARIES = {"grad", "data", "grad_dtype", "fp32_precision", "training", "lr", "qkv", "gate_up"}


def test_no_mode_is_set_by_writing_into_another_object():
    """Learner, publisher and layers change another object by its methods, assigning no field of
    another file's class. `lr` is a property, `qkv` and `gate_up` submodules; the others are torch's
    and transformers'.
    """
    for room in ("learner", "sync", "quant/layers", "quant/model"):
        for file in (ROOT / "qarl" / room).rglob("*.py"):
            stored = [
                node for _, node in nodes(ast.Attribute, [file]) if isinstance(node.ctx, ast.Store)
            ]
            own = {
                node.attr for node in stored if ast.unparse(node.value) in ("self", "cls", "ctx")
            }
            declared = [line for _, each in nodes(ast.ClassDef, [file]) for line in each.body]
            own |= {
                ast.unparse(line.target) for line in declared if isinstance(line, ast.AnnAssign)
            }
            for node in stored:
                assert node.attr in own | OF_LIBRARIES, f"{file}:{node.lineno}: {ast.unparse(node)}"


DECOYS = ("configs", "quant", "learner", "rollout", "sync", "tests")


@pytest.fixture
def decoys(tmp_path: Path) -> Path:
    """Return a folder with a package of each room's name that cannot be imported."""
    for name in DECOYS:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise ImportError('the decoy {name}')\n")
    return tmp_path


def test_every_module_is_imported_beside_packages_of_the_rooms_names(decoys: Path):
    """These are the light ones, and those that every command needs; scripts/check_wheel.sh
    trains in such a folder.
    """
    code = (
        "import qarl.cli.main, qarl.loop, qarl.rollout.vllm.options, qarl.rollout.servers.open,"
        " qarl.sync.export"
    )
    subprocess.run([sys.executable, "-c", code], cwd=decoys, check=True)


def test_a_reward_may_be_called_quant(decoys: Path):
    """`python -m qarl` has the working folder first on its path, and the reward is imported from
    its file.
    """
    (decoys / "quant.py").write_text("raise ImportError('the reward was imported')\n")
    (decoys / "questions.jsonl").write_text(
        '{"question": "1 + 1 =", "answer": "2", "split": "train"}\n'
    )
    options = [
        "--task",
        "questions.jsonl",
        "--reward",
        "quant.py:reward",
        "--eval.problems",
        "0",
    ]
    command = [sys.executable, "-m", "qarl", "check", *options]
    done = subprocess.run(command, cwd=decoys, capture_output=True, text=True)
    assert done.returncode == 2
    assert "the reward was imported" in done.stderr
