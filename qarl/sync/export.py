"""Publish into a folder: a deployable checkpoint for vLLM and transformers, of config, tokenizer,
published tensors.
"""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from qarl.configs.errors import QarlError
from qarl.configs.files import written_aside
from qarl.quant.checkpoint.load import empty_model
from qarl.quant.digest import StreamDigest
from qarl.quant.model.low_bit_model import LowBitModel
from qarl.quant.tensor_files import write_tensors
from qarl.quant.types import LowBitTensor

_COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "spiece.model",
    "tokenizer.model",
    "vocab.txt",
    "tekken.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
)


class ExportError(QarlError, heading="export"):
    """A checkpoint folder that could not be written, or does not hold what was published."""


def export_checkpoint(
    model: LowBitModel, source: Path, folder: Path, note: dict[str, Any] | None = None
) -> StreamDigest:
    """Write the model's present weight version to `folder`; `source` gives tokenizer and generation
    config. note: what qarl.json is to say, besides the digest; None writes none.
    """
    return write_checkpoint(model.low_bit_tensors(), checkpoint_config(model), source, folder, note)


def export_masters(model: LowBitModel, source: Path, folder: Path) -> None:
    """Write the model's masters to `folder` as transformers writes them, in the master dtype: a
    model to train on from.

    source: folder whose tokenizer and generation config are copied. The folder appears complete or
    not at all. Raises `ExportError` where it exists.
    """
    if folder.exists():
        raise ExportError(f"folder {str(folder)!r} exists; choose another or remove it")
    whole = empty_model(model.config)
    whole.load_state_dict(model.loaded_state(), strict=False, assign=True)
    whole.tie_weights()
    with written_aside(folder) as building:
        whole.save_pretrained(building)
        copy_companions(source, building)


def checkpoint_config(model: LowBitModel) -> dict[str, Any]:
    """config.json of the exported model: the architecture's, the compute dtype, the scheme's
    quantization.
    """
    config = model.config.to_dict()
    config["dtype"] = str(model.dtype).removeprefix("torch.")
    config.pop("quantization_config", None)
    # where the masters were read from, a path of this machine
    config.pop("_name_or_path", None)
    quantization = model.plan.quantization_config(model.context.kv_cache)
    if quantization is not None:
        config["quantization_config"] = quantization
    return config


def write_checkpoint(
    stream: Iterable[LowBitTensor],
    config: dict[str, Any],
    source: Path,
    folder: Path,
    note: dict[str, Any] | None = None,
) -> StreamDigest:
    """Write a stream as safetensors beside config and tokenizer; the folder appears complete or not
    at all.

    config: contents of config.json. source: folder whose tokenizer and generation config are
    copied. note: of qarl.json, to which the digest is added; None writes none. Returns the digest
    of what was written. Raises `ExportError` where the folder exists or the disk refuses.
    """
    if folder.exists():
        raise ExportError(f"folder {str(folder)!r} exists; choose another or remove it")
    try:
        with written_aside(folder) as building:
            building.mkdir(parents=True)
            files = dict(write_tensors(stream, building, digest := StreamDigest()))
            _name_files(building, files, digest.bytes)
            (building / "config.json").write_text(
                json.dumps(config, indent=2, sort_keys=True) + "\n"
            )
            if note is not None:
                note = {**note, "digest": digest.hexdigest()}
                (building / "qarl.json").write_text(json.dumps(note, indent=2) + "\n")
            copy_companions(source, building)
    # safetensors' own is what a full disk raises while it writes
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ExportError(f"cannot write checkpoint {str(folder)!r}: {reason}") from error
    return digest


def copy_companions(source: Path, folder: Path) -> None:
    """Copy a model folder's tokenizer and generation config, whichever files it has, into another
    folder.
    """
    for name in _COMPANIONS:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def _name_files(folder: Path, files: dict[str, list[str]], total: int) -> None:
    """As transformers looks for them. files: by name, and the tensors in each. total: bytes of all
    tensors.
    """
    names = [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    names = names if len(names) > 1 else ["model.safetensors"]
    for file, name in zip(files, names, strict=True):
        (folder / file).rename(folder / name)
    if len(names) > 1:
        index = {
            key: name for name, keys in zip(names, files.values(), strict=True) for key in keys
        }
        written = {"metadata": {"total_size": total}, "weight_map": index}
        (folder / "model.safetensors.index.json").write_text(json.dumps(written, indent=2) + "\n")
