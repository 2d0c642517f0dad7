"""Hook of mkdocs that turns links out of docs/ (README, examples, sources) into text.

All other links have to resolve.
"""

import re

_OUTSIDE = re.compile(
    r"\[([^\]]*)\]\((?:\.\./)+(?:README|CONTRIBUTING|examples|configs|scripts|tests|benchmarks)[^)]*\)"
)


def on_page_markdown(markdown: str, **_: object) -> str:
    """Return a page's text for mkdocs."""
    return _OUTSIDE.sub(r"\1", markdown)
