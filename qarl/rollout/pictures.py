"""Picture files as pixels: one function for the prompt's maker and for the engine."""

import io
import warnings
from typing import Any

_PLAIN = ("RGB", "L", "1", "P", "CMYK", "YCbCr", "LAB", "HSV")
"""Pillow's names of colour spaces of 8 bits a channel that it converts to RGB."""
_TRANSPARENT = ("RGBA", "RGBa", "LA", "La", "PA")
"""Pillow's names of colour spaces with transparency."""
_DEEP = "I;16"
"""Beginning of Pillow's names of grey pictures with 16 bits a pixel."""
_SHOWN = 128
"""Upper bound on a thumbnail's sides, in pixels. With a byte a pixel its file has up to 18 kB."""


def open_picture(file: bytes) -> Any:
    """Return a picture file's pixels as a `PIL.Image.Image` in RGB, 8 bits a channel.

    Grey, palettes, CMYK and other colour spaces are converted. Transparent pixels are shown on
    white. Grey of 16 bits keeps its upper 8. The picture is turned as its EXIF data say.

    Raises `ValueError` in words that follow "the picture": for bytes that are no whole picture, one
    that moves, a colour space that is not known, and more pixels than Pillow takes for safe.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            picture: Any = Image.open(io.BytesIO(file))
            frames = getattr(picture, "n_frames", 1)
            if frames > 1:
                raise ValueError(
                    f"has {frames} frames; only pictures that stand still are taken, so choose one"
                    " of them"
                )
            picture.load()
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ValueError(
            f"is too large to be opened ({error}); make it smaller before training"
        ) from error
    except UnidentifiedImageError as error:
        beginning = file[:8].hex(" ") or "nothing"
        raise ValueError(
            f"is in no known format: {len(file)} bytes that begin with {beginning}; write it as PNG"
            " or JPEG"
        ) from error
    # Pillow's decoders raise many kinds for damaged files: OSError, SyntaxError, struct.error, …
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(
            f"is damaged: {type(error).__name__}: {error}; write it again from where it came from"
        ) from error
    picture = ImageOps.exif_transpose(picture)
    if picture.mode.startswith(_DEEP):
        return picture.point(lambda grey: grey / 256).convert("L").convert("RGB")
    if picture.mode in _TRANSPARENT or "transparency" in picture.info:
        layer = picture.convert("RGBA")
        white = Image.new("RGBA", layer.size, "white")
        return Image.alpha_composite(white, layer).convert("RGB")
    if picture.mode not in _PLAIN:
        raise ValueError(
            f"has the colour space {picture.mode!r}, of which it is not clear what is white;"
            f" convert it to one of {', '.join((*_PLAIN, *_TRANSPARENT))}"
        )
    return picture.convert("RGB")


def thumbnail(file: bytes) -> bytes:
    """Return a PNG of a picture that `open_picture` takes, for a page that shows it to people.

    It has up to 128 pixels a side and up to 256 colours.
    """
    picture = open_picture(file)
    picture.thumbnail((_SHOWN, _SHOWN))
    buffer = io.BytesIO()
    picture.quantize(256).save(buffer, "PNG", optimize=True)
    return buffer.getvalue()
