"""README.md of an export: front matter that the Hub reads, and what a person asks first."""

from pathlib import Path
from typing import Any

import yaml

from qarl.run.export_note import read_note
from qarl.tasks.rows import short_name

NAME = "README.md"


def write_card(export: Path) -> None:
    """Write the card of an export from its qarl.json."""
    note = read_note(export)
    text = f"{_front_matter(note)}\n# {note['run']}\n\n{_what(note)}\n\n{_facts(note)}\n{_USE}"
    (export / NAME).write_text(text, encoding="utf-8")


def _front_matter(note: dict[str, Any]) -> str:
    hub = {"base_model": note["base"]} if "/" in note["base"] else {}  # else it is a folder's name
    low_bit = [] if note["scheme"] == "bf16" else ["compressed-tensors", note["scheme"]]
    tree = {
        **hub,
        **note["licence"],
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["qarl", "reinforcement-learning", *low_bit],
    }
    return f"---\n{yaml.safe_dump(tree, sort_keys=False)}---\n"


def _what(note: dict[str, Any]) -> str:
    how = (
        f"quantized to {note['scheme']} by {note['ptq']} after reinforcement learning in bf16"
        if "ptq" in note
        else f"trained by reinforcement learning with QaRL as the {note['scheme']} policy it is"
    )
    return f"`{note['base']}`, {how}: step {note['step']}."


def _facts(note: dict[str, Any]) -> str:
    rows = {
        "task": short_name(note["task"]["name"]),
        "held-out accuracy": _accuracy(note),
        "scheme": ", ".join([note["scheme"], *note["layers"]]),
        "compute dtype": note["dtype"],
        "keys and values": note.get("kv_cache") or note["dtype"],
        "prompt and new tokens": f"at most {note['max_prompt_tokens']} and {note['max_new_tokens']}",
        "digest of the weights": f"`{note['digest']}`",
        "versions": ", ".join(f"{name} {version}" for name, version in note["versions"].items()),
    }
    lines = (f"| {name} | {value} |" for name, value in rows.items() if value)
    return "\n".join(["| | |", "|---|---|", *lines, ""])


def _accuracy(note: dict[str, Any]) -> str | None:
    if "heldout_accuracy" not in note:
        return None
    interval = note["heldout_interval"]
    between = f" [{100 * interval[0]:.1f}, {100 * interval[1]:.1f}]" if interval else ""
    return f"{note['heldout_accuracy']:.1%}{between} of {note['heldout_problems']} problems"


_USE = """
`qarl.json` has the same for programs, with the whole task. To serve it, and to measure it again:

```
vllm serve FOLDER
qarl eval FOLDER
```
"""
