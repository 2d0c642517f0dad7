"""Text that a test expects, in a file that a person can read: expected/NAME.txt beside the test.

Write it anew, where a change is meant: QARL_RECORD=1 pytest -n 0 the/test_file.py, then read it.
"""

import os
import textwrap
from pathlib import Path

from qarl.report.finding import Finding


def assert_expected(test: str, name: str, lines: list[str]) -> None:
    """Compare lines of text with the file of that name. test: the test's `__file__`."""
    file = Path(test).parent / "expected" / f"{name}.txt"
    text = "".join(f"{line.rstrip()}\n" for line in lines)
    if os.environ.get("QARL_RECORD"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    assert text.splitlines() == file.read_text().splitlines()


def finding_lines(finding: Finding) -> list[str]:
    """Return a finding as lines of up to 100 characters: level, subject, text and remedy."""
    text = f"{finding.level}: {finding.about}: {finding.text}"
    lines = textwrap.wrap(text, 100, subsequent_indent="    ", break_long_words=False)
    if finding.remedy:
        remedy = f"-> {finding.remedy}"
        lines += textwrap.wrap(
            remedy, 100, initial_indent="    ", subsequent_indent="    ", break_long_words=False
        )
    return lines
