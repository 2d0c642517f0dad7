"""Files of a model folder: config.json, tokenizer, weights and their headers.

It reads JSON, headers and bytes and imports neither torch nor transformers. What config.json says
is in `settings`, and what is refused for it in `check_folder`.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from qarl.configs.errors import ModelError
from qarl.configs.hub import hub_or_cache

_TOKENIZERS = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tekken.json",
)
COMPANIONS = (
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
    "chat_template.json",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
"""Files of a model folder that are copied beside the tensors: tokenizer, generation config, and
processors of pictures.
"""
_GGUF = ".gguf"
_PART = 1 << 24
"""Number of bytes of a tensor that are read at once."""


def local_folder(name: str) -> Path | None:
    """Return the folder `name`, or None if it reads as a hub id (owner/name).

    Raises `ModelError` for anything else, including a GGUF file.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.is_file() and path.suffix.lower() == _GGUF:
        raise ModelError(f"model {name!r} is a GGUF file; {_gguf_remedy(path)}")
    if path.is_file():
        raise ModelError(
            f"model {name!r} is a file; give the folder of a model in transformers' format"
            " (config.json, tokenizer and *.safetensors)"
        )
    parts = name.split("/")
    is_hub_id = len(parts) == 2 and all(parts) and not name.startswith((".", "~"))
    if not is_hub_id:
        raise ModelError(
            f"model folder {name!r} does not exist; give a transformers folder, or a hub id"
            " (owner/name)"
        )
    return None


def hub_config(name: str) -> Path:
    """Return the config.json of a hub id, downloaded if it is not in the cache.

    Raises `ModelError` if it cannot be downloaded.
    """
    from huggingface_hub import hf_hub_download

    try:
        with hub_or_cache():
            return Path(hf_hub_download(name, "config.json"))
    except Exception as error:
        raise not_in_hub(name, error) from error


def not_in_hub(name: str, error: Exception) -> ModelError:
    """Return the error for a hub id whose download failed with `error`."""
    reason = str(error).strip().partition("\n")[0]
    return ModelError(
        f"model {name!r} is not a folder here, and could not be downloaded from the hub:"
        f" {reason}; check the path or the id, the network (HF_ENDPOINT for a mirror, HF_HOME for"
        " a cache filled elsewhere), and HF_TOKEN for gated models"
    )


def read_config(folder: Path) -> dict[str, Any]:
    """Return config.json's settings. Raise `ModelError` if it is missing or no JSON object."""
    if not (folder / "config.json").is_file():
        if (folder / "config.yaml").is_file():
            raise ModelError(
                f"{str(folder)!r} is a run, no model; give the model it was trained from (`model`"
                f" in its config.yaml), or, of an unquantized run, {str(folder / 'export')!r}"
            )
        if gguf := _gguf_files(folder):
            raise ModelError(
                f"model folder {str(folder)!r} holds a GGUF file and no config.json;"
                f" {_gguf_remedy(gguf[0])}"
            )
        if (folder / "sft.yaml").is_file():
            raise ModelError(
                f"{str(folder)!r} was written by `qarl sft`; give {str(folder / 'masters')!r} to"
                f" train on, and {str(folder / 'export')!r} to serve or evaluate"
            )
        runs = sorted(file.parent for file in folder.glob("*/config.yaml"))
        instead = (
            f"one of the runs in it, such as {str(runs[-1])!r}"
            if runs
            else "a transformers model folder"
        )
        raise ModelError(f"model folder {str(folder)!r} has no config.json; give {instead}")
    return _read_object(folder / "config.json")


def end_tokens(folder: Path) -> set[int]:
    """Return the token ids that end a completion by a folder's files, as vLLM reads them: those of
    generation_config.json, or of config.json if there is none.

    The tokenizer's own end token is another one.
    """
    files = (folder / name for name in ("generation_config.json", "config.json"))
    first = next((file for file in files if file.is_file()), None)
    written = None if first is None else _read_object(first).get("eos_token_id")
    ends = written if isinstance(written, list) else [written]
    return {end for end in ends if isinstance(end, int)}


def text_config(folder: Path) -> dict[str, Any]:
    """Return the settings of config.json that describe the language model."""
    config = read_config(folder)
    text = config.get("text_config")
    return config | text if isinstance(text, dict) else config


def check_tokenizer(folder: Path) -> None:
    """Raise `ModelError` if the tokenizer's files are missing or unreadable."""
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        raise ModelError(
            f"model folder {str(folder)!r} has no tokenizer (tokenizer.json, tokenizer.model or"
            " vocab.json); copy it from where the model came from"
        )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            _read_object(folder / name)


def has_chat_template(folder: Path) -> bool:
    """Return whether the tokenizer's files contain a chat template."""
    file = folder / "tokenizer_config.json"
    written = _read_object(file) if file.is_file() else {}
    return bool(written.get("chat_template")) or (folder / "chat_template.jinja").is_file()


def weight_files(folder: Path) -> list[Path]:
    """Return the checkpoint's safetensors files; [] for a checkpoint in another format.

    Raises `ModelError` if a file is missing.
    """
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    if not index.is_file():
        return [single] if single.is_file() else []
    names = _read_object(index).get("weight_map")
    if not isinstance(names, dict):
        raise ModelError(f"{str(index)!r} has no weight_map; copy it again")
    files = [folder / name for name in sorted(set(names.values()))]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ModelError(
            f"model {str(folder)!r} lacks {len(missing)} of its {len(files)} weight files, the"
            f" first being {missing[0]!r}; copy them too"
        )
    return files


def tensor_shapes(folder: Path) -> dict[str, list[int]]:
    """Return name → shape of every tensor, from the files' headers.

    The result is {} for a checkpoint in another format than safetensors. Raises `ModelError` for a
    folder without weights, and for a file that is cut short or no safetensors file.
    """
    files = weight_files(folder)
    if not files and not any(folder.glob("*.bin")):
        if gguf := _gguf_files(folder):
            raise ModelError(
                f"model folder {str(folder)!r} has its weights in a GGUF file;"
                f" {_gguf_remedy(gguf[0])}"
            )
        raise ModelError(
            f"model folder {str(folder)!r} has no weights (model.safetensors, or"
            " model.safetensors.index.json and the files it lists)"
        )
    shapes: dict[str, list[int]] = {}
    for file in files:
        try:
            with safe_open(file, "numpy") as tensors:
                shapes |= {
                    name: list(tensors.get_slice(name).get_shape())
                    for name in tensors.keys()  # noqa: SIM118
                }
        except SafetensorError as error:
            raise ModelError(
                f"{str(file)!r} is not a safetensors file, or cut short: {error}; copy it again"
            ) from error
    return shapes


def own_head(folder: Path) -> bool:
    """Return whether the files have an lm_head that differs from the embedding.

    transformers and vLLM keep both then, whatever tie_word_embeddings says. Files that are missing
    count as if they had neither.
    """
    names = _tensor_places(folder)
    heads = [name for name in names if name.endswith("lm_head.weight")]
    embeddings = [name for name in names if name.endswith("embed_tokens.weight")]
    if len(heads) != 1 or len(embeddings) != 1:
        return False
    return not same_bytes(folder, heads[0], embeddings[0])


def same_bytes(folder: Path, first: str, second: str) -> bool:
    """Return whether two tensors of the files have the same dtype, shape and bytes.

    Both are read until they differ, in parts of 16 MiB.
    """
    places = _tensor_places(folder)
    (file, start, about), (other_file, other_start, other_about) = places[first], places[second]
    if about != other_about:
        return False
    left = about[0]
    with file.open("rb") as stream, other_file.open("rb") as other_stream:
        stream.seek(start)
        other_stream.seek(other_start)
        while left > 0:
            part = stream.read(min(left, _PART))
            if not part or part != other_stream.read(len(part)):
                return False
            left -= len(part)
    return True


def _tensor_places(folder: Path) -> dict[str, tuple[Path, int, tuple[int, str, tuple[int, ...]]]]:
    """Return name → (file, offset of the first byte, (bytes, dtype, shape)) of every tensor."""
    places = {}
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            try:
                # any eight bytes may stand for a size, so that no more is read than there is
                header = json.loads(stream.read(min(size, file.stat().st_size)))
            except ValueError:
                header = None
            if not isinstance(header, dict):
                raise ModelError(
                    f"{str(file)!r} is not a safetensors file, or cut short; copy it again"
                )
        for name, entry in header.items():
            if name != "__metadata__":
                start, end = entry["data_offsets"]
                about = (end - start, entry["dtype"], tuple(entry["shape"]))
                places[name] = (file, 8 + size + start, about)
    return places


def _gguf_files(folder: Path) -> list[Path]:
    """Return the folder's GGUF files."""
    return sorted(file for file in folder.glob("*") if file.suffix.lower() == _GGUF)


def _gguf_remedy(file: Path) -> str:
    """Return instructions for making a folder of a GGUF file, with three lines of Python."""
    folder = str(file.absolute().parent)
    target = file.stem
    return (
        "give the original checkpoint, whose weights were not rounded. If there is none, this"
        " Python makes a transformers folder of the file (pip install gguf first), for --model"
        f" {target}:\n  from transformers import AutoModelForCausalLM, AutoTokenizer; folder, file"
        f" = {folder!r}, {file.name!r}\n  AutoTokenizer.from_pretrained(folder,"
        f" gguf_file=file).save_pretrained({target!r})\n  model ="
        " AutoModelForCausalLM.from_pretrained(folder, gguf_file=file);"
        f" model.hf_quantizer.remove_quantization_config(model); model.save_pretrained({target!r})"
    )


def _read_object(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raise `ModelError` if it is unreadable or another value."""
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{str(file)!r} cannot be read: {error.strerror}") from error
    except ValueError as error:  # invalid JSON or invalid UTF-8
        raise ModelError(f"{str(file)!r} is not JSON: {error}; copy it again") from error
    if not isinstance(tree, dict):
        raise ModelError(
            f"{str(file)!r} holds a {type(tree).__name__}, not an object of settings; copy it again"
        )
    return tree


def file_digests(folder: Path) -> dict[str, str]:
    """Return name → SHA-256 of each file that says how the tensors are computed with and asked."""
    names = ("config.json", *COMPANIONS)
    return {
        name: hashlib.sha256((folder / name).read_bytes()).hexdigest()
        for name in names
        if (folder / name).is_file()
    }
