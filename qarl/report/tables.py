"""Tables that are readable at any width: no name or figure is ever cut off."""

from collections.abc import Collection, Iterator, Sequence
from itertools import zip_longest

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

_GAP = "  "


class PlainTable:
    """A table of aligned columns.

    If a terminal is too narrow, cells are wrapped between words. If that is not enough, each row
    becomes a block with one column a line. Without a terminal (a pipe, a log) every row is one line
    of any length.
    """

    def __init__(
        self,
        *columns: str,
        figures: Collection[str] = (),
        title: str = "",
        caption: str | Text = "",
    ):
        """Create an empty table.

        columns: names of the columns. figures: names of the columns that are aligned on the right
        and never wrap.
        """
        self.title = title
        self.caption = caption
        self._columns = [Text(column, style="bold") for column in columns]
        self._figures = [column in figures for column in columns]
        self._rows: list[list[Text]] = []

    def add_row(self, *cells: str | Text) -> None:
        """Add a row of one cell a column. A `str` has no markup; a `Text` has a style."""
        if len(cells) != len(self._columns):
            raise ValueError(f"{len(cells)} cells for {len(self._columns)} columns")
        self._rows.append([Text(cell) if isinstance(cell, str) else cell for cell in cells])

    def texts(self) -> list[list[str]]:
        """Return the columns' names, and then each row's cells."""
        return [[cell.plain for cell in row] for row in (self._columns, *self._rows)]

    def show(self, console: Console) -> None:
        """Print the table."""
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
        """Return the columns' widths, or None if whole words do not fit into `limit`."""
        columns = list(zip(self._columns, *self._rows, strict=True))
        widths = [max(cell.cell_len for cell in column) for column in columns]
        if limit is None:
            return widths
        smallest = [
            _smallest_width(column, figures)
            for column, figures in zip(columns, self._figures, strict=True)
        ]
        available = limit - len(_GAP) * (len(widths) - 1)
        # Narrow the widest column that can be narrower, one character at a time.
        while sum(widths) > available:
            spare = [width - least for width, least in zip(widths, smallest, strict=True)]
            if max(spare) <= 0:
                return None
            shrinkable = [i for i in range(len(widths)) if spare[i] > 0]
            widest = max(shrinkable, key=lambda i: (widths[i], i))
            widths[widest] -= 1
        return widths

    def _lines(self, console: Console, widths: Sequence[int]) -> Iterator[Text]:
        """Yield the rows in aligned columns of these widths; a row may take several lines."""
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
        """Yield each row as a block, with a line or more for each column."""
        title_width = max(title.cell_len for title in self._columns)
        cell_width = None if limit is None else max(limit - title_width - len(_GAP), 1)
        for row in self._rows:
            for title, cell in zip(self._columns, row, strict=True):
                for number, part in enumerate(_wrapped(cell, console, cell_width)):
                    head = title if number == 0 else Text()
                    yield Text.assemble(head, " " * (title_width - head.cell_len), _GAP, part)
            yield Text()


def _smallest_width(column: Sequence[Text], figures: bool) -> int:
    """Return the smallest width of a column: of its longest word, or of its longest figure.

    The first cell is the column's name, which may wrap in a column of figures too.
    """
    title, *cells = column
    widths = [cell.cell_len if figures else _longest_word(cell) for cell in cells]
    return max([_longest_word(title), *widths])


def _longest_word(cell: Text) -> int:
    return max((Text(word).cell_len for word in cell.plain.split()), default=0)


def _wrapped(text: Text, console: Console, width: int | None) -> list[Text]:
    """Return the lines of a text, wrapped to `width` if there is one, but never within a word."""
    if not width:
        return list(text.split("\n"))
    return list(text.wrap(console, max(width, _longest_word(text))))
