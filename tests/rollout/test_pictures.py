"""Picture files as pixels: colour spaces, damage, limits."""

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from qarl.rollout.pictures import open_picture, thumbnail
from tests.support.picture_models import drawn, encoded

RED = (200, 30, 40)


def solid(mode: str, colour: Any) -> Any:
    """Return a picture of 5 by 3 pixels in one colour."""
    return Image.new(mode, (5, 3), colour)


@pytest.mark.parametrize(
    ("picture", "form", "expected"),
    [
        (solid("RGB", RED), "PNG", RED),
        (solid("L", 77), "PNG", (77, 77, 77)),
        (solid("1", 1), "PNG", (255, 255, 255)),
        (solid("RGB", RED).quantize(4), "PNG", RED),
        (solid("CMYK", (0, 255, 255, 0)), "TIFF", (255, 0, 0)),
        (solid("RGBA", (*RED, 255)), "PNG", RED),
        (solid("RGBA", (*RED, 0)), "PNG", (255, 255, 255)),
        (solid("RGBA", (0, 0, 0, 128)), "PNG", (127, 127, 127)),
        (solid("LA", (0, 0)), "PNG", (255, 255, 255)),
        (Image.fromarray(np.full((3, 5), 77 * 256 + 200, np.uint16)), "PNG", (77, 77, 77)),
    ],
)
def test_colour_spaces_become_rgb(picture: Any, form: str, expected: tuple[int, int, int]):
    """Contract: transparent pixels are shown on white, and 16 bits keep their upper 8."""
    opened = open_picture(encoded(picture, form))
    assert (opened.mode, opened.size) == ("RGB", (5, 3))
    assert opened.getpixel((2, 1)) == expected


def test_a_picture_is_turned_as_its_exif_data_say():
    picture = Image.new("RGB", (5, 3))
    exif = picture.getexif()
    exif[0x0112] = 6  # a quarter turn
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", exif=exif)
    assert open_picture(buffer.getvalue()).size == (3, 5)


def test_damaged_and_unknown_files_are_refused_with_the_reason():
    """Contract: a file cut at any drawn place is refused, or is whole."""
    whole = drawn(np.random.default_rng(0), 40, 30)
    for cut in np.random.default_rng(1).integers(1, len(whole) - 20, 8):
        with pytest.raises(ValueError, match=r"^is (damaged|in no known format)"):
            open_picture(whole[: int(cut)])
    with pytest.raises(ValueError, match=r"^is in no known format: 3 bytes that begin with 61 62"):
        open_picture(b"abc")


def test_moving_pictures_unclear_spaces_and_bombs_are_refused():
    frames = [solid("RGB", RED), solid("RGB", (0, 0, 0))]
    buffer = io.BytesIO()
    frames[0].save(buffer, "GIF", save_all=True, append_images=frames[1:])
    with pytest.raises(ValueError, match=r"^has 2 frames"):
        open_picture(buffer.getvalue())
    with pytest.raises(ValueError, match=r"^has the colour space 'F'"):
        open_picture(encoded(solid("F", 0.5), "TIFF"))
    with pytest.raises(ValueError, match=r"^is too large to be opened"):
        open_picture(encoded(Image.new("1", (20_000, 9_000))))


def test_thumbnails_are_small_files_of_the_same_picture():
    """Contract: up to 128 pixels a side and 18 kB, of noise, too. A picture of few colours that is
    as small keeps its pixels.
    """
    noise = thumbnail(drawn(np.random.default_rng(0), 700, 350))
    assert len(noise) < 18_000
    assert open_picture(noise).size == (128, 64)
    assert len(thumbnail(drawn(np.random.default_rng(0), 128, 128))) < 18_000
    small = Image.new("RGB", (5, 3), RED)
    small.putpixel((1, 1), (0, 0, 0))
    shown = open_picture(thumbnail(encoded(small)))
    assert shown.tobytes() == small.tobytes()
