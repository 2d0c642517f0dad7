"""One version and one distribution name, wherever they are written."""

import re
import tomllib
from pathlib import Path

import yaml

import qarl
from qarl.quant.runtime.answers import versions

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_version_is_written_once_and_cited():
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {
        "attr": "qarl.configs.version.VERSION"
    }
    assert "version" not in PROJECT["project"]
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == qarl.__version__
    assert versions()["qarl"] == qarl.__version__


def test_install_lines_name_the_distribution_and_extras_that_exist():
    """A registry's `qarl` is another package."""
    extras = PROJECT["project"]["optional-dependencies"]
    texts = [ROOT / "README.md", ROOT / "docker/install.sh"]
    texts += [*(ROOT / "qarl").rglob("*.py"), *(ROOT / "docs").rglob("*.md")]
    lines = [
        match
        for file in texts
        for match in re.findall(r"(qarl[\w-]*)\[([a-z,]+)\]", file.read_text())
    ]
    assert len(lines) > 5
    for name, names in lines:
        assert name == PROJECT["project"]["name"]
        assert set(names.split(",")) <= set(extras)
