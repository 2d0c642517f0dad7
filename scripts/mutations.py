"""Draw the mutations of a room's code at random from its syntax tree, for scripts/mutate.py."""

import ast
import itertools
import random
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SWAPS: dict[type[ast.AST], type[Any]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
EXTREMES = {
    "min": "max",
    "amin": "amax",
    "minimum": "maximum",
    "clamp_min": "clamp_max",
    "clamp_min_": "clamp_max_",
}
EXTREMES |= {high: low for low, high in EXTREMES.items()}
TALK = {"print", "logger", "logging", "warnings", "warn", "log", "progress", "say"}
"""Names in statements that only print or log; these statements are not mutated."""


@dataclass(frozen=True)
class Mutation:
    """One change of a source file."""

    file: str
    """Path from the root."""
    line: int
    """Line number, from 1."""
    start: int
    """First byte of the file that `after` replaces."""
    end: int
    """End of the bytes that `after` replaces."""
    function: str
    """Qualified name of the function; "" at the top level of a module or class."""
    before: str
    after: str

    def planted(self, source: bytes) -> bytes:
        """Return the file's bytes with this fault."""
        return source[: self.start] + self.after.encode() + source[self.end :]


class Sites(ast.NodeVisitor):
    """Collector of every mutation of one file, in order of the tree."""

    def __init__(self, file: str, source: bytes) -> None:
        self.sites: list[Mutation] = []
        self._file = file
        self._source = source
        self._scope = [("", False)]
        lengths = [len(line) for line in source.splitlines(keepends=True)]
        self._starts = [sum(lengths[:number]) for number in range(len(lengths))]
        self.visit(ast.parse(source))

    def _add(self, node: Any, after: ast.AST | str) -> None:
        start = self._starts[node.lineno - 1] + node.col_offset
        end = self._starts[node.end_lineno - 1] + node.end_col_offset
        text = after if isinstance(after, str) else f"({ast.unparse(after)})"
        before = self._source[start:end].decode()
        in_function = self._scope[-1][1]
        function = ".".join(name for name, _ in self._scope[1:]) if in_function else ""
        self.sites.append(Mutation(self._file, node.lineno, start, end, function, before, text))

    def visit(self, node: ast.AST) -> None:
        """Collect the mutations of a node and its children.

        Skipped are imports, annotations, decorators, messages of errors, f-strings, and zip's
        `strict`, which changes nothing if lengths are equal.
        """
        if isinstance(node, (ast.Import, ast.ImportFrom, ast.Raise, ast.JoinedStr)):
            return
        if _is_said(node):
            return
        if isinstance(node, ast.keyword) and node.arg == "strict":
            return
        if isinstance(node, ast.AnnAssign) and node.value is None:
            return
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            self._scope.append((node.name, True))
            for part in [
                *node.args.defaults,
                *filter(None, node.args.kw_defaults),
                *node.body,
            ]:
                self.visit(part)
            self._scope.pop()
            return
        if isinstance(node, ast.ClassDef):
            self._scope.append((node.name, False))
        self._mutate(node)
        for name, value in ast.iter_fields(node):
            if name not in ("annotation", "decorator_list", "returns"):
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST):
                        self.visit(child)
        if isinstance(node, ast.ClassDef):
            self._scope.pop()

    def _mutate(self, node: ast.AST) -> None:
        """Collect the changes of one node, without its children."""
        if isinstance(node, ast.Compare):
            for index, operator in enumerate(node.ops):
                operators = list(node.ops)
                operators[index] = SWAPS[type(operator)]()
                self._add(node, ast.Compare(node.left, operators, node.comparators))
        elif isinstance(node, ast.BoolOp):
            self._add(node, ast.BoolOp(SWAPS[type(node.op)](), node.values))
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            self._add(node, node.operand)
        elif isinstance(node, ast.BinOp) and type(node.op) in SWAPS and self._scope[-1][1]:
            self._add(node, ast.BinOp(node.left, SWAPS[type(node.op)](), node.right))
        elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
            value = node.value
            grown = value + 1 if isinstance(value, int) else value * 1.1 or 1.0
            self._add(node, repr(not value if isinstance(value, bool) else grown))
        elif isinstance(node, ast.Call) and isinstance(node.func, (ast.Name, ast.Attribute)):
            name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
            if name in EXTREMES:
                before = ast.unparse(node.func)
                self._add(node.func, before[: len(before) - len(name)] + EXTREMES[name])
        elif isinstance(node, (ast.Expr, ast.AugAssign, ast.Assign, ast.AnnAssign)):
            targets = (
                node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            )
            plain = isinstance(node, (ast.Assign, ast.AnnAssign))
            docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            if not docstring and (
                not plain or all(isinstance(target, ast.Attribute) for target in targets)
            ):
                self._add(node, "pass")


def _is_said(node: ast.AST) -> bool:
    """Return whether a statement only prints or logs, or runs only in a script or type checker."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        function = node.value.func
        while isinstance(function, ast.Attribute):
            function = function.value
        return isinstance(function, ast.Name) and function.id in TALK
    if isinstance(node, ast.Assign):
        return any(
            isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets
        )
    return isinstance(node, ast.If) and any(
        word in ast.unparse(node.test) for word in ("TYPE_CHECKING", "__main__")
    )


def draw(room: str, count: int, seed: int, root: Path) -> list[Mutation]:
    """Draw `count` of the room's mutations without replacement; skip those that do not compile."""
    folder = f"qarl/{room}"
    excluded = []
    if room == "qarl":
        folder = "qarl"
        rooms = ("configs", "quant", "rollout", "learner", "sync")
        excluded = [f":!qarl/{name}" for name in rooms]
    command = ["git", "ls-files", f"{folder}/*.py", *excluded]
    files = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True)
    sources = {file: (root / file).read_bytes() for file in sorted(files.stdout.split())}
    sites = [site for file, source in sources.items() for site in Sites(file, source).sites]
    random.Random(f"{room} {seed}").shuffle(sites)
    compiling = (site for site in sites if _compiles(site, sources))
    return list(itertools.islice(compiling, count))


def _compiles(mutation: Mutation, sources: dict[str, bytes]) -> bool:
    try:
        compile(mutation.planted(sources[mutation.file]), mutation.file, "exec")
    except SyntaxError:
        return False
    return True
