"""The benchmarks' pictures: both files come out, equal input gives equal bytes, unusable input is refused. Whether a
picture reads well is left to eyes."""

import math
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.plots import Line, LinePanel, draw, plot_stem
from qarl.configs.errors import ConfigError

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


def test_lengths_that_differ_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"'t': 'a' has lengths \[2, 1\]"):
        draw([LinePanel("t", "x", "y", [Line("a", [1, 2], [1])])], tmp_path / "plot")
    assert not list(tmp_path.iterdir())


def test_a_plot_s_name_may_have_either_suffix_and_needs_its_folder(tmp_path: Path):
    for name in ("speed", "speed.svg", "speed.png"):
        assert plot_stem("--plot", str(tmp_path / name)) == tmp_path / "speed"
    assert plot_stem("--plot", str(tmp_path / "speed.v2")) == tmp_path / "speed.v2"
    with pytest.raises(ConfigError, match=r"--plot gone/speed\.svg: 'gone' is no folder"):
        plot_stem("--plot", "gone/speed.svg")
    (tmp_path / "taken.png").mkdir()
    with pytest.raises(ConfigError, match=r"taken\.png' is a folder"):
        plot_stem("--plot", str(tmp_path / "taken"))
