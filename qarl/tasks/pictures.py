"""Pictures of rows: a column of them, and parts of chat messages.

Every picture is opened once when a task is loaded, so that a missing or damaged one stops a run
before it begins.
"""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qarl.configs.words import quoted
from qarl.rollout.pictures import open_picture
from qarl.tasks.base import PICTURE, Picture, TaskError
from qarl.tasks.rows import HUB, Row

_COLUMNS = ("image", "images", "picture", "pictures")
"""Names of a column of pictures, in any case."""
_PARTS = ("image", "image_url")
"""Kinds of a message's parts that are pictures."""
_PNG = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")
"""Pillow's names of the colour spaces that PNG files have."""
_FORMS = (
    "a path relative to the file of questions, or a data set's image (bytes and path), or a list of"
    " these"
)


def column_of_pictures(row: Row) -> str | None:
    """Return the name of the row's column of pictures; None if it has none, or null or an empty
    list in it.

    Raises `TaskError` if it has several.
    """
    names = [
        name
        for name, value in row.values.items()
        if str(name).lower() in _COLUMNS and not _is_nothing(value)
    ]
    if len(names) > 1:
        raise TaskError(
            f"{row.where}: columns {' and '.join(map(repr, names))} both hold pictures; drop one,"
            " or put all pictures into a list in one of them"
        )
    return names[0] if names else None


def pictures_of(row: Row, column: str | None) -> tuple[Picture, ...]:
    """Return the pictures in a column. Raises `TaskError` for one that cannot be opened."""
    if column is None:
        return ()
    values = row.values[column]
    if not isinstance(values, list | tuple):
        values = [values]
    return tuple(_picture(row, column, value) for value in values)


class MessagePictures:
    """The pictures of a chat's messages, in the order of their places.

    A part without a picture of its own, {"type": "image"}, is the place of the column's next one.

    Args:
        row: the row.
        in_column: the pictures of its column.
    """

    def __init__(self, row: Row, in_column: Sequence[Picture]):
        self._row = row
        self._in_column = in_column
        self._places = 0
        """Number of places for pictures of the column."""
        self._pictures: list[Picture] = []

    def text_of(self, parts: Sequence[Any]) -> str:
        """Return the text of a message's parts, with `PICTURE` for each picture.

        Raises `TaskError` for a part that is neither text nor a picture.
        """
        texts = []
        for part in parts:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind == "text" and isinstance(part.get("text"), str):
                texts.append(part["text"])
            elif kind in _PARTS:
                texts.append(PICTURE)
                self._take(part)
            else:
                raise TaskError(
                    f"{self._row.where}: a part of a message must be"
                    f' {{"type": "text", "text": "…"}} or {{"type": "image"}}; got {quoted(part)}'
                )
        return "".join(texts)

    def all(self) -> tuple[Picture, ...]:
        """Return the pictures of all messages.

        Raises `TaskError` if the messages have more or fewer places than there are pictures.
        """
        if self._places and self._places != len(self._in_column):
            raise TaskError(
                f"{self._row.where}: the messages have {self._places} places for pictures"
                f' ({{"type": "image"}}), and the row has {len(self._in_column)} pictures; give as'
                " many pictures as places"
            )
        if self._pictures and not self._places and self._in_column:
            raise TaskError(
                f"{self._row.where}: the messages have pictures of their own, and the row has"
                f" {len(self._in_column)} more without a place; drop the column, or give each a"
                ' place ({"type": "image"})'
            )
        return tuple(self._pictures) or tuple(self._in_column)

    def _take(self, part: dict[str, Any]) -> None:
        own = [part.get(key) for key in ("image", "path", "url", "image_url")]
        own = [value for value in own if not _is_nothing(value)]
        if own:
            self._pictures.append(_picture(self._row, "a message's image", own[0]))
            return
        if self._places < len(self._in_column):
            self._pictures.append(self._in_column[self._places])
        self._places += 1


def _is_nothing(value: Any) -> bool:
    """Return whether a value stands for no picture. An empty path does not: it may be a mistake."""
    return value is None or (isinstance(value, list | tuple) and not value)


def _picture(row: Row, column: str, value: Any) -> Picture:
    """Return the picture that a value describes. Raises `TaskError` if it cannot be opened."""
    source = _source(row, column, value)
    name = str(source) if isinstance(source, Path) else f"of {len(source)} bytes"
    try:
        picture = Picture.of(source)
        open_picture(picture.contents())
    except OSError as error:
        raise TaskError(
            f"{row.where}: {column!r}: the picture {name} cannot be read:"
            f" {error.strerror or error}; paths are relative to the file of questions, so put it"
            " there, or correct the path"
        ) from error
    except ValueError as error:
        raise TaskError(f"{row.where}: {column!r}: the picture {name} {error}") from error
    return picture


def _source(row: Row, column: str, value: Any) -> Path | bytes:
    """Return the file or the contents that a value describes."""
    if hasattr(value, "getpixel"):  # a picture of Pillow's, as `datasets` decodes them
        buffer = io.BytesIO()
        value.save(buffer, "PNG" if value.mode in _PNG else "TIFF")
        return buffer.getvalue()
    if isinstance(value, dict):  # an image that `datasets` has not decoded
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes):
        return value
    if isinstance(value, str) and not value.strip():
        raise TaskError(
            f"{row.where}: {column!r} has an empty path, {value!r}; give the picture's path. A"
            " question without a picture has null (.jsonl, .parquet), or a file without this column"
        )
    if isinstance(value, str) and "://" not in value and not value.startswith("data:"):
        return _folder(row) / Path(value).expanduser()
    remedy = "; download it first" if isinstance(value, str) else ""
    raise TaskError(f"{row.where}: {column!r} must be {_FORMS}; got {quoted(value)}{remedy}")


def _folder(row: Row) -> Path:
    """Return the folder in which a row's relative paths begin."""
    where = row.where.rpartition(":")[0]
    if not where.startswith(HUB):
        return Path(where).parent
    return Path(where.removeprefix(HUB).rpartition("[")[0])
