"""Hook of mkdocs that adds the API's reference, from the docstrings of every public name.

mkdocstrings reads sources without importing them. The page exists in the site alone; a checkout has
docs/reference/api.md, and `help(qarl.align)`.
"""

import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files  # pyright: ignore[reportMissingImports]

PAGE = "reference/docstrings.md"
_OPENING = """# Docstrings of the API

This page lists every public name of `import qarl` with its signature and its docstring, as the
sources have them.
[The API's page](api.md) introduces the names, with examples that a test runs.
"""


def on_files(files: Files, config: Any) -> Files:
    """Add the page of docstrings to the site's files."""
    files.append(File.generated(config, PAGE, content=page()))
    return files


def page() -> str:
    """Return the page's markdown: a directive of mkdocstrings for each name."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import qarl
    from qarl import verify

    names = [
        *(f"qarl.{name}" for name in qarl.__all__),
        *(f"qarl.verify.{name}" for name in verify.__all__),
    ]
    return _OPENING + "".join(f"\n::: {name}\n" for name in names)
