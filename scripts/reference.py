#!/usr/bin/env python3
"""Write docs/reference/ from the code: the options come from the configuration's schema.

    scripts/reference.py [--check]

--check changes nothing and exits with 1 if a page differs.
"""

import sys
from pathlib import Path

from qarl.cli.help import all_fields

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = ROOT / "docs" / "reference"
COLUMNS = 110

OPTIONS = """# Options

Made from the configuration's schema by `scripts/reference.py`; \
`qarl train --help-all` prints the same. In a YAML file
each dot is a level. Defaults in brackets are those of `qarl train` without a model or file.

```
{fields}
```
"""


def pages() -> dict[str, str]:
    """Return file below docs/reference/ → its text."""
    _, fields = all_fields(COLUMNS).split("\n\n", 1)  # skip the sentence on defaults
    return {"options.md": OPTIONS.format(fields=fields)}


def main(arguments: list[str]) -> int:
    """Write the pages, or print which would change."""
    files = {REFERENCE / name: text for name, text in pages().items()}
    different = [
        file
        for file, text in files.items()
        if not file.exists() or file.read_text(encoding="utf-8") != text
    ]
    for file in different:
        print(
            f"{file.relative_to(ROOT)}"
            f" {'differs from the code' if '--check' in arguments else 'was written'}"
        )
        if "--check" not in arguments:
            file.write_text(files[file], encoding="utf-8")
    return int("--check" in arguments and bool(different))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
