"""Sizes of published models: fields of their config.json."""

import json
from pathlib import Path

PUBLISHED = json.loads(Path(__file__).with_suffix(".json").read_text())
