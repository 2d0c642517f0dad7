"""Tables that read at any width: names and figures are never cut, and without a terminal every row
is one line.
"""

from collections.abc import Collection, Iterator, Sequence
from itertools import zip_longest

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

_GAP = "  "


class PlainTable:
    """Aligned columns. A terminal too narrow for them gets words wrapped between words, and where
    that is not enough each row as a block, one column a line. Elsewhere (a pipe, a log) rows are as
    long as they are.

    figures: columns aligned on the right, which never wrap. Cells are text as it is, without
    markup; `Text` for style.
    """

    def __init__(
        self,
        *columns: str,
        figures: Collection[str] = (),
        title: str = "",
        caption: str | Text = "",
    ):
        self.title = title
        self.caption = caption
        self._columns = [Text(column, style="bold") for column in columns]
        self._figures = [column in figures for column in columns]
        self._rows: list[list[Text]] = []

    def add_row(self, *cells: str | Text) -> None:
        """One cell a column."""
        if len(cells) != len(self._columns):
            raise ValueError(f"{len(cells)} cells for {len(self._columns)} columns")
        self._rows.append([Text(cell) if isinstance(cell, str) else cell for cell in cells])

    def texts(self) -> list[list[str]]:
        """The columns' names, and then each row's cells."""
        return [[cell.plain for cell in row] for row in (self._columns, *self._rows)]

    def show(self, console: Console) -> None:
        """Print it."""
        console.print(
            self,
            crop=False,
            soft_wrap=not console.is_terminal,
            no_wrap=True,
            overflow="ignore",
        )

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        limit = options.max_width if console.is_terminal else None
        if self.title:
            yield from _wrapped(Text(self.title, style="bold"), console, limit)
        widths = self._widths(limit)
        yield from (
            self._blocks(console, limit) if widths is None else self._lines(console, widths)
        )
        if self.caption:
            caption = Text(self.caption) if isinstance(self.caption, str) else self.caption
            yield from _wrapped(caption, console, limit)

    def _widths(self, limit: int | None) -> list[int] | None:
        """Of the columns, together at most `limit`; None where whole words do not fit."""
        columns = list(zip(self._columns, *self._rows, strict=True))
        widths = [max(cell.cell_len for cell in column) for column in columns]
        if limit is None:
            return widths
        least = [
            max(
                cell.cell_len if figures and place else _longest_word(cell)
                for place, cell in enumerate(column)
            )
            # whose title, the first, may wrap
            for column, figures in zip(columns, self._figures, strict=True)
        ]
        room = limit - len(_GAP) * (len(widths) - 1)
        while sum(widths) > room:
            spare = [width - smallest for width, smallest in zip(widths, least, strict=True)]
            if max(spare) <= 0:
                return None
            widest = max((width, i) for i, width in enumerate(widths) if spare[i] > 0)[1]
            widths[widest] -= 1
        return widths

    def _lines(self, console: Console, widths: Sequence[int]) -> Iterator[Text]:
        for row in (self._columns, *self._rows):
            cells = [
                list(cell.wrap(console, width)) or [Text()]
                for cell, width in zip(row, widths, strict=True)
            ]
            for parts in zip_longest(*cells):
                line = Text()
                for part, width, figures in zip(parts, widths, self._figures, strict=True):
                    text = part or Text()
                    text.rstrip()
                    text.align("right" if figures else "left", width)
                    line.append_text(text).append(_GAP)
                line.rstrip()
                yield line

    def _blocks(self, console: Console, limit: int | None) -> Iterator[Text]:
        column = max(title.cell_len for title in self._columns)
        for row in self._rows:
            for title, cell in zip(self._columns, row, strict=True):
                lines = _wrapped(
                    cell,
                    console,
                    None if limit is None else max(limit - column - len(_GAP), 1),
                )
                for number, part in enumerate(lines):
                    head = title if number == 0 else Text()
                    yield Text.assemble(head, " " * (column - head.cell_len), _GAP, part)
            yield Text()


def _longest_word(cell: Text) -> int:
    return max((Text(word).cell_len for word in cell.plain.split()), default=0)


def _wrapped(text: Text, console: Console, width: int | None) -> list[Text]:
    return (
        list(text.wrap(console, max(width, _longest_word(text))))
        if width
        else list(text.split("\n"))
    )
