"""A task with pictures: coloured shapes on white, drawn from a seed.

It exists so that a run with pictures needs no data set. Answers are one word or a digit.
"""

import io
import random
from dataclasses import dataclass
from typing import Any

from qarl.tasks.dataset import Dataset

_COLOURS = {
    "red": (214, 39, 40),
    "green": (44, 160, 44),
    "blue": (31, 80, 200),
    "black": (0, 0, 0),
}
_SHAPES = ("circle", "square", "triangle")
_QUESTIONS = ("colour", "shape", "count")


@dataclass
class DrawnShapesConfig:
    """Sizes of the pictures, and what is asked."""

    side: int = 56  # Width and height of a picture in pixels
    most: int = 4  # Most shapes of a picture, all of one kind and colour
    about: str = "all"  # What is asked: colour, shape, count, or all of them in turn
    seed: int | None = None
    size: int = 500

    def validate(self) -> None:
        """Raise AssertionError for invalid sizes, as reasoning-gym's own configurations do."""
        assert self.side >= 16, "side must be at least 16"
        assert 1 <= self.most <= 9, "most must be from 1 to 9"
        assert self.about in ("all", *_QUESTIONS), "about must be colour, shape, count or all"


class DrawnShapesDataset(Dataset):
    """Say the colour, the kind or the number of shapes in a drawn picture"""

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return problem `index`, from a generator of its own."""
        generator = random.Random(self.seed + index)
        colour = generator.choice(list(_COLOURS))
        shape = generator.choice(_SHAPES)
        count = generator.randint(1, self.config.most)
        picture = draw(generator, self.config.side, shape, colour, count)
        about = self.config.about
        if about == "all":
            about = generator.choice(_QUESTIONS)
        question, answer = {
            "colour": ("What colour?", colour),
            "shape": ("What shape?", shape),
            "count": ("How many?", str(count)),
        }[about]
        return {
            "question": question,
            "answer": answer,
            "metadata": {"colour": colour, "shape": shape, "count": count},
            "pictures": [picture],
        }

    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float:
        """Return 1.0 for the right word or digit, else 0.0."""
        return float((answer or "").strip().lower().rstrip(".") == entry["answer"])


def draw(generator: random.Random, side: int, shape: str, colour: str, count: int) -> bytes:
    """Return a PNG of shapes that do not touch, at random places.

    The picture is a grid of cells, of which `count` are chosen. generator: it chooses them, and the
    size of each shape.
    """
    from PIL import Image, ImageDraw

    picture = Image.new("RGB", (side, side), "white")
    pen = ImageDraw.Draw(picture)
    cells = next(n for n in range(1, 4) if n * n >= count)
    width = side / cells
    for cell in generator.sample(range(cells * cells), count):
        row, column = divmod(cell, cells)
        margin = width * generator.uniform(0.1, 0.25)
        left = column * width + margin
        top = row * width + margin
        right = (column + 1) * width - margin
        bottom = (row + 1) * width - margin
        box = (left, top, right, bottom)
        if shape == "circle":
            pen.ellipse(box, fill=_COLOURS[colour])
        elif shape == "square":
            pen.rectangle(box, fill=_COLOURS[colour])
        else:
            pen.polygon(
                [((left + right) / 2, top), (right, bottom), (left, bottom)],
                fill=_COLOURS[colour],
            )
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return buffer.getvalue()
