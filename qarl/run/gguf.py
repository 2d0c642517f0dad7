"""`qarl export --format gguf`: an export as a GGUF file for llama.cpp."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qarl.configs.files import written_aside
from qarl.report.startup import phase
from qarl.run.export_note import changes_in_words, find_export, read_note
from qarl.sync.gguf.exported import Exported, read_exported
from qarl.sync.gguf.families import gguf_family
from qarl.sync.gguf.vocabulary import Vocabulary, read_vocabulary
from qarl.sync.gguf.write import WrittenGguf, write_gguf

NOTE = "gguf.json"
"""File beside the GGUF file that has its SHA-256, and what it was made of."""


@dataclass(frozen=True)
class ExportedGguf:
    """Result of an export to GGUF."""

    source: Path
    """Folder of the export that the file was made of."""
    written: WrittenGguf
    """The file."""
    remarks: tuple[str, ...]
    """What llama.cpp does otherwise than the engine that the export was measured in."""


def export_gguf(target: Path, output: Path) -> ExportedGguf:
    """Write an export as a GGUF file into a new folder.

    The codes and scales are the export's. Every tensor is read back and compared. The folder
    appears complete or not at all.

    Args:
        target: exported checkpoint, or a run whose export is of its newest checkpoint.
        output: folder to create.

    Raises:
        ConfigError: `target` has no export, or an older one.
        GgufError: the export was changed, or a GGUF file cannot have it exactly.
    """
    source = find_export(target)
    note = read_note(source)
    exported = read_exported(source)
    family = gguf_family(exported.config)
    vocabulary = read_vocabulary(source, exported.config.vocab_size)
    if note.get("digest"):
        with phase("comparing the export with its digest"):
            exported.check_digest(note["digest"])
    name = _name(source, note)
    with written_aside(output) as building:
        building.mkdir(parents=True)
        with phase("writing the GGUF file, and reading it back"):
            about = _about(name, note)
            written = write_gguf(exported, family, vocabulary, building, name, about)
        made_of = {key: note.get(key) for key in ("run", "step", "scheme", "digest")}
        facts = {
            "file": written.name,
            "sha256": written.sha256,
            "bytes": written.size,
            "tensors": dict(written.kinds),
            "export": made_of,
        }
        (building / NOTE).write_text(json.dumps(facts, indent=2) + "\n")
    return ExportedGguf(source, written, remarks=tuple(_remarks(exported, vocabulary, source)))


def _name(source: Path, note: dict[str, Any]) -> str:
    """Return a name for the file: letters, digits, dots, dashes."""
    name = note.get("run") or source.resolve().name
    return re.sub(r"[^A-Za-z0-9.-]+", "-", str(name)).strip("-.") or "model"


def _about(name: str, note: dict[str, Any]) -> dict[str, str]:
    """Return the file's keys that say what it is."""
    facts = {
        "general.name": name,
        "general.license": note.get("licence", {}).get("license"),
        "qarl.run": note.get("run"),
        "qarl.step": note.get("step"),
        "qarl.scheme": note.get("scheme"),
        "qarl.base": note.get("base"),
        "qarl.digest": note.get("digest"),
    }
    return {key: str(value) for key, value in facts.items() if value is not None}


def _remarks(exported: Exported, vocabulary: Vocabulary, source: Path) -> Iterator[str]:
    """Yield what was changed since the export was measured, and what llama.cpp does otherwise."""
    if (changes := changes_in_words(source)) is not None:
        yield changes
    if exported.schemes:
        yield (
            "llama.cpp rounds the inputs of low-bit products to int8 in blocks of 32 columns, so"
            " log-probs are near those of the export, not equal (docs/guide/gguf.md)"
        )
    if exported.kv_cache:
        yield (
            "keys and values were in fp8; llama.cpp has them in fp16 (-ctk and -ctv choose another"
            " type)"
        )
    if vocabulary.chat_template is None:
        yield "the tokenizer has no chat template: ask for completions, not for chats"
