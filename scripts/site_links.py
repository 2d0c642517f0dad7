"""mkdocs' hook: links of a page that leave docs/ (README, examples, sources) become text; all
others have to hold.
"""

import re

_OUTSIDE = re.compile(
    r"\[([^\]]*)\]\((?:\.\./)+(?:README|CONTRIBUTING|examples|configs|scripts|tests|benchmarks)[^)]*\)"
)


def on_page_markdown(markdown: str, **_: object) -> str:
    """A page's text, as mkdocs is to read it."""
    return _OUTSIDE.sub(r"\1", markdown)
