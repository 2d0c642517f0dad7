"""The benchmarks' pictures: both files come out, equal input gives equal bytes. Whether a
picture reads well is left to eyes."""

import math
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.plots import Line, LinePanel, draw

LINES = LinePanel(
    "decode", "batch", "tok/s",
    [Line("bf16", [1, 4, 16], [10, 30, 80], [9, 28, 75], [11, 32, 90]), Line("w8a8", [1, 4], [15, math.nan])],
    reference=10, logarithmic_x=True,
)  # fmt: skip


def test_a_picture_is_written_as_svg_and_png_the_same_each_time(tmp_path: Path):
    """Contract: two files, the SVG with the labels as text, and the same bytes from the same input."""
    svg, png = draw([LINES], tmp_path / "a.b", "speed")
    assert [file.name for file in (svg, png)] == ["a.b.svg", "a.b.png"]
    assert png.read_bytes().startswith(b"\x89PNG")
    texts = {element.text for element in ElementTree.parse(svg).iter() if element.tag.endswith("text")}
    assert {"speed", "decode", "batch", "bf16", "w8a8", "4", "16"} <= texts
    again = draw([LINES], tmp_path / "again", "speed")
    assert [file.read_bytes() for file in again] == [svg.read_bytes(), png.read_bytes()]
