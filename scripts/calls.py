"""Record which functions of a folder a process and its children run, for scripts/mutate.py."""

import ast
import builtins
import os
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

NOTE = "_ran_by_a_test"
"""Name of the builtin that every function calls first.

A tracer would be called for every library's functions too, which takes three times as long.
"""


class Calls:
    """Record of the functions below root/qarl that were called.

    file: file to which other processes append theirs, one per line.
    """

    def __init__(self, root: Path | str, file: Path | str) -> None:
        self.root = Path(root)
        self.file = Path(file)
        self._ran = set[str]()
        self._writes = os.environ.get("MUTATE_PID") not in (None, str(os.getpid()))
        os.register_at_fork(after_in_child=self._in_child)

    def watch(self) -> None:
        """Start recording in all threads: modules imported from now on note which functions run."""
        os.environ.setdefault("MUTATE_PID", str(os.getpid()))
        setattr(builtins, NOTE, self._note)
        original = SourceFileLoader.source_to_code

        def source_to_code(loader: Any, data: Any, path: Any, **options: Any) -> Any:
            module = ""
            if isinstance(path, str):
                module = os.path.realpath(path).removeprefix(f"{self.root}/")
            # numba compiles the functions that it reads, and cannot compile the call
            if module.startswith("qarl/") and b"import njit" not in data:
                data = noting(bytes(data), module)
            return original(loader, data, path, **options)

        SourceFileLoader.source_to_code = source_to_code  # type: ignore[method-assign]

    def taken(self) -> set[str]:
        """Return the functions that ran since the last call, as "file:function".

        Those of the processes that this one started are included.
        """
        ran = self._ran
        self._ran = set()
        if self.file.exists():
            ran |= set(self.file.read_text().split("\n")) - {""}
            self.file.unlink()
        return ran

    def _in_child(self) -> None:
        self._writes = True
        self._ran = set()

    def _note(self, name: str) -> None:
        if name in self._ran:
            return
        self._ran.add(name)
        if self._writes:
            with self.file.open("a") as lines:
                lines.write(f"{name}\n")


def noting(source: bytes, place: str) -> ast.Module:
    """Return the module with a call of `NOTE` at the start of each function and each lambda.

    In a function the call follows the docstring.
    """
    tree = ast.parse(source)
    _Noting(place).visit(tree)
    return ast.fix_missing_locations(tree)


class _Noting(ast.NodeTransformer):
    def __init__(self, module: str) -> None:
        self._module = module
        self._scope = list[str]()

    def _call(self) -> ast.Call:
        name = ast.Constant(f"{self._module}:{'.'.join(self._scope)}")
        return ast.Call(ast.Name(NOTE, ast.Load()), [name], [])

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        self._scope.append(node.name)
        self.generic_visit(node)
        self._scope.pop()
        return node

    def visit_FunctionDef(self, node: Any) -> ast.AST:
        self._scope.append(node.name)
        node.body = [self.visit(statement) for statement in node.body]
        node.body.insert(
            int(ast.get_docstring(node, clean=False) is not None),
            ast.Expr(self._call()),
        )
        self._scope.pop()
        return node

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return self.visit_FunctionDef(node)

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        self.generic_visit(node)
        node.body = ast.Subscript(
            ast.Tuple([self._call(), node.body], ast.Load()),
            ast.Constant(1),
            ast.Load(),
        )
        return node
