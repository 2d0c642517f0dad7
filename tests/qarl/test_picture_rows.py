"""Rows with pictures: columns, parts of messages, and what is refused before a run begins."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from qarl.rollout.pictures import open_picture
from qarl.tasks import Problem, TaskError
from qarl.tasks.base import PICTURE
from qarl.tasks.procedural import ReasoningGymTask
from qarl.tasks.rows import Row
from qarl.tasks.table import Columns, make_table
from tests.support.picture_models import drawn


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with three pictures and room for a file of questions."""
    generator = np.random.default_rng(0)
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.png").write_bytes(drawn(generator, 20, 10))
    return tmp_path


def read(folder: Path, values: dict[str, Any]) -> Problem:
    """Return the problem of one row of a file in the folder."""
    row = Row(f"{folder / 'q.jsonl'}:1", {"question": "what?", "answer": "x", **values})
    table = make_table("q.jsonl", [row], Columns())
    (problem,) = [problem for problems in table.by_split.values() for problem in problems]
    return problem


def test_a_column_holds_paths_bytes_or_pictures_of_pillow(folder: Path):
    a = (folder / "a.png").read_bytes()
    for value in (
        "a.png",
        ["a.png"],
        str(folder / "a.png"),
        {"bytes": a, "path": "elsewhere.png"},
        {"bytes": None, "path": "a.png"},
        a,
    ):
        (picture,) = read(folder, {"image": value}).pictures
        assert picture.contents() == a
    (picture,) = read(folder, {"Images": [Image.new("CMYK", (4, 4))]}).pictures
    assert picture.contents()
    problem = read(folder, {"pictures": ["a.png", "b.png"], "note": 3})
    assert [picture.contents() for picture in problem.pictures] == [
        a,
        (folder / "b.png").read_bytes(),
    ]
    assert problem.metadata == {"note": 3}
    for nothing in (None, []):
        assert not read(folder, {"image": nothing}).pictures


def test_parts_of_messages_are_places_of_pictures(folder: Path):
    parts = [{"type": "image"}, {"type": "text", "text": "and"}, {"type": "image"}]
    problem = read(
        folder,
        {"question": [{"role": "user", "content": parts}], "images": ["a.png", "b.png"]},
    )
    assert problem.messages == ({"role": "user", "content": f"{PICTURE}and{PICTURE}"},)
    assert problem.question == "and"
    own = [{"type": "image", "path": "c.png", "text": None}, {"type": "text", "text": "?"}]
    problem = read(folder, {"question": [{"role": "user", "content": own}]})
    (picture,) = problem.pictures
    assert picture.contents() == (folder / "c.png").read_bytes()


def test_the_same_question_about_other_pictures_is_another_one(folder: Path):
    rows = [
        Row(
            f"{folder / 'q.jsonl'}:{number}",
            {"question": "what?", "answer": "x", "image": f"{name}.png"},
        )
        for number, name in enumerate("abca")
    ]
    table = make_table("q.jsonl", rows, Columns())
    assert sum(map(len, table.by_split.values())) == 3
    assert table.counts.repeated == 1


IMAGE = {"type": "image"}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"image": "d.png"}, r"'image': the picture .*d\.png cannot be read: No such file"),
        ({"image": {"bytes": b"abc", "path": "a.png"}}, r"of 3 bytes is in no known format"),
        ({"image": "https://host/a.png"}, r"'image' must be a path .*download it first"),
        ({"image": ""}, r"'image' has an empty path, ''; .*has null \(\.jsonl"),
        ({"images": ["a.png", " "]}, r"'images' has an empty path, ' '"),
        (
            {"question": [{"role": "user", "content": [{"type": "image", "path": ""}]}]},
            r"\"a message's image\" has an empty path",
        ),
        ({"image": 7}, r"'image' must be a path .*got 7"),
        ({"image": "a.png", "pictures": "b.png"}, r"columns 'image' and 'pictures' both hold"),
        (
            {"question": [{"role": "user", "content": [IMAGE, IMAGE]}], "image": "a.png"},
            r"have 2 places for pictures .* and the row has 1 pictures",
        ),
        (
            {"question": [{"role": "user", "content": [IMAGE]}]},
            r"have 1 places for pictures .* and the row has 0 pictures",
        ),
        (
            {
                "question": [{"role": "user", "content": [{**IMAGE, "image": "a.png"}]}],
                "image": "b.png",
            },
            r"pictures of their own, and the row has 1 more without a place",
        ),
        (
            {"question": [{"role": "user", "content": [{"type": "file"}]}]},
            r"a part of a message must be",
        ),
    ],
)
def test_unusable_pictures_are_refused_with_row_and_remedy(
    folder: Path, values: dict[str, Any], words: str
):
    with pytest.raises(TaskError, match=rf"q\.jsonl:1: .*{words}|q\.jsonl:1: {words}"):
        read(folder, values)


def test_a_picture_that_changes_after_loading_is_refused(folder: Path):
    (picture,) = read(folder, {"image": "a.png"}).pictures
    (folder / "a.png").write_bytes((folder / "b.png").read_bytes())
    with pytest.raises(TaskError, match="has changed since the task was loaded"):
        picture.contents()
    (folder / "a.png").unlink()
    with pytest.raises(TaskError, match="cannot be read any more"):
        picture.contents()


def test_drawn_shapes_show_what_the_answer_says():
    """Contract: pictures are a function of the seed, and have the colour that is asked for."""
    task = ReasoningGymTask("drawn_shapes", {"about": "colour", "most": 3})
    problems = task.problems("train", 0, 6, seed=1)
    again = task.problems("train", 0, 6, seed=1)
    assert [p.pictures for p in problems] == [p.pictures for p in again]
    colours = {"red": 0, "green": 1, "blue": 2}
    for problem in problems:
        pixels = np.asarray(open_picture(problem.pictures[0].contents())).reshape(-1, 3)
        inked = pixels[(pixels != 255).any(-1)].astype(int)
        if problem.answer == "black":
            assert not inked.any()
        else:
            assert (inked.argmax(-1) == colours[problem.answer]).all()
        assert task.score(problem, f" {problem.answer.upper()}.") == 1.0
        assert task.score(problem, "pink") == 0.0
