"""Export to a folder: a deployable checkpoint for vLLM and transformers.

It consists of config, tokenizer and published tensors.
"""

import json
import shutil
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from qarl.configs.errors import QarlError
from qarl.configs.files import written_aside
from qarl.quant.checkpoint.families import stacks_stored_transposed
from qarl.quant.checkpoint.folder import COMPANIONS, file_digests, read_config, weight_files
from qarl.quant.checkpoint.load import empty_model
from qarl.quant.checkpoint.source_config import with_source_fields
from qarl.quant.checkpoint.whole import (
    Whole,
    has_towers,
    levels_of,
    read_whole,
    served_settings,
    whole_of,
)
from qarl.quant.digest import StreamDigest
from qarl.quant.model.low_bit_model import LowBitModel
from qarl.quant.tensor_files import write_tensors
from qarl.quant.types import LowBitTensor
from qarl.rollout.types import RequestDefaults
from qarl.sync.request_defaults import write_defaults


class ExportError(QarlError, heading="export"):
    """A checkpoint folder could not be written, or does not contain what was published."""


def export_checkpoint(
    model: LowBitModel,
    source: Path,
    folder: Path,
    note: dict[str, Any] | None = None,
    defaults: RequestDefaults | None = None,
) -> StreamDigest:
    """Write the model's present weight version to `folder`.

    The other arguments are those of `write_checkpoint`.
    """
    config = checkpoint_config(model)
    return write_checkpoint(model.low_bit_tensors(), config, source, folder, note, defaults)


def export_masters(model: LowBitModel, source: Path, folder: Path) -> None:
    """Write the model's masters to `folder` as transformers writes them, in the master dtype.

    Training can start from the result. The folder appears complete or not at all. Raises
    `ExportError` if it exists.

    source: folder whose tokenizer and generation config are copied.
    """
    if folder.exists():
        raise ExportError(f"folder {str(folder)!r} exists; choose another or remove it")
    plain = empty_model(model.config)
    plain.load_state_dict(model.loaded_state(), strict=False, assign=True)
    plain.tie_weights()
    whole = whole_of(model.config)
    with written_aside(folder) as building:
        plain.save_pretrained(building)
        file = building / "config.json"
        if whole is None:
            complete = with_source_fields(json.loads(file.read_text()), model.config)
        else:
            dtype = next(iter(model.loaded.values())).dtype
            complete = _settings(model, dtype)
            _make_whole(whole, stacks_stored_transposed(plain), source, building)
        _write_config(file, complete)
        copy_companions(source, building)


def _make_whole(whole: Whole, turned: Collection[str], source: Path, folder: Path) -> None:
    """Give a language model's tensors in `folder` the names they have in the whole, and add the
    towers of `source`.

    turned: own names of stacks that the whole has transposed. transformers 5.19 does not transpose
    them when it saves.
    """
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    files = {}
    for number, file in enumerate(sorted(folder.glob("*.safetensors"))):
        tensors = {
            whole.written_name(name): tensor.transpose(1, 2).contiguous()
            if name in turned
            else tensor
            for name, tensor in load_file(file).items()
        }
        file.unlink()
        save_file(tensors, folder / f"tensors-{number}.safetensors", metadata={"format": "pt"})
        files[f"tensors-{number}.safetensors"] = list(tensors)
    files |= _copy_towers(source, folder)
    size = sum((folder / name).stat().st_size for name in files)
    _name_files(folder, files, size)


def checkpoint_config(model: LowBitModel) -> dict[str, Any]:
    """Return the config.json of the exported model.

    It has the architecture's settings, fields of the source's config.json that transformers' class
    drops, the compute dtype, and the schemes' quantization.
    """
    config = _settings(model, model.dtype)
    quantization = model.plan.quantization_config(model.context.kv_cache)
    if quantization is not None:
        config["quantization_config"] = quantization
    return config


def _settings(model: LowBitModel, dtype: torch.dtype) -> dict[str, Any]:
    """Return a config.json of the model in a dtype, without quantization."""
    config = served_settings(model.config, type(model.module).__name__)
    for level in levels_of(config):
        level.pop("torch_dtype", None)
        level["dtype"] = str(dtype).removeprefix("torch.")
        level.pop("quantization_config", None)
    # The folder of the masters is a path of this machine.
    config.pop("_name_or_path", None)
    return config


def write_checkpoint(
    stream: Iterable[LowBitTensor],
    config: dict[str, Any],
    source: Path,
    folder: Path,
    note: dict[str, Any] | None = None,
    defaults: RequestDefaults | None = None,
) -> StreamDigest:
    """Write a stream as safetensors beside config and tokenizer.

    The folder appears complete or not at all. Returns the digest of the stream.

    Args:
        config: contents of config.json.
        source: folder whose tokenizer and generation config are copied, and whose towers for
            pictures or sound, if `config` has some.
        note: contents of qarl.json, to which digests of tensors and of the other files are added.
            Default: no such file.
        defaults: how the policy was asked, which chat template and generation config then say, and
            qarl.json under "requests". Default: the generation config has the base's token ids.

    Raises:
        ExportError: the folder exists, or writing failed.
    """
    if folder.exists():
        raise ExportError(f"folder {str(folder)!r} exists; choose another or remove it")
    try:
        with written_aside(folder) as building:
            building.mkdir(parents=True)
            digest = StreamDigest()
            files = dict(write_tensors(stream, building, digest))
            size = digest.bytes
            if has_towers(config):
                towers = _copy_towers(source, building)
                size += sum((building / file).stat().st_size for file in towers)
                files |= towers
            _name_files(building, files, size)
            _write_config(building / "config.json", config)
            copy_companions(source, building)
            write_defaults(building, config, defaults or RequestDefaults())
            if note is not None:
                own = {"requests": defaults.record()} if defaults else {}
                proofs = {"digest": digest.hexdigest(), "files": file_digests(building)}
                note = {**note, **own, **proofs}
                (building / "qarl.json").write_text(json.dumps(note, indent=2) + "\n")
    # A full disk raises safetensors' own error while it writes.
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ExportError(f"cannot write checkpoint {str(folder)!r}: {reason}") from error
    return digest


def _copy_towers(source: Path, folder: Path) -> dict[str, list[str]]:
    """Copy all tensors of `source` that are not its language model's; return file → their names.

    Each of the source's files that has such tensors becomes one file.
    """
    whole = read_whole(source)
    assert whole is not None, f"{source} has towers"
    files = {}
    for number, file in enumerate(weight_files(source)):
        with safe_open(file, "pt") as tensors:
            names = [name for name in tensors.keys() if not whole.own_name(name)]  # noqa: SIM118
            towers = {name: tensors.get_tensor(name) for name in names}
        if towers:
            target = folder / f"towers-{number}.safetensors"
            save_file(towers, target, metadata={"format": "pt"})
            target.chmod(0o644)  # as `write_tensors` does
            files[target.name] = names
    return files


def _write_config(file: Path, config: dict[str, Any]) -> None:
    """Write the settings of a config.json."""
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def copy_companions(source: Path, folder: Path) -> None:
    """Copy tokenizer and generation config from a model folder to another one.

    Files that the folder does not have are left out.
    """
    for name in COMPANIONS:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    _keep_tokenization(source, folder)


def _keep_tokenization(source: Path, folder: Path) -> None:
    """Write tokenizer.json as transformers reads that of `source`, if it reads the copy otherwise.

    transformers chooses a tokenizer's class by the model_type in config.json, and some classes
    split texts by a rule of their own, whatever tokenizer.json says. A language model that was part
    of another model has another type.
    """
    needed = (source / "config.json", folder / "config.json", folder / "tokenizer.json")
    if not all(file.is_file() for file in needed):
        return
    if read_config(source).get("model_type") == read_config(folder).get("model_type"):
        return
    readings = [AutoTokenizer.from_pretrained(each).backend_tokenizer for each in (source, folder)]
    if readings[0].to_str() != readings[1].to_str():
        readings[0].save(str(folder / "tokenizer.json"))


def _name_files(
    folder: Path,
    files: dict[str, list[str]],
    total: int,
) -> None:
    """Name files as transformers looks for them, with an index if there are several.

    files: name of each file → names of its tensors. total: bytes of all tensors.
    """
    names = [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    names = names if len(names) > 1 else ["model.safetensors"]
    for file, name in zip(files, names, strict=True):
        (folder / file).rename(folder / name)
    if len(names) > 1:
        weight_map = {
            key: name for name, keys in zip(names, files.values(), strict=True) for key in keys
        }
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
