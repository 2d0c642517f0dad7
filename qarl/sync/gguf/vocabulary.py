"""A tokenizer as llama.cpp has it, recognized by what it does to a text, never guessed.

llama.cpp knows pre-tokenizers by name and has the code of each. Such a name is chosen here by the
tokenizer's own normalizer, pre-tokenizer and merging, so an unknown combination is refused: with a
wrong name llama.cpp would split some texts into other tokens, silently.

Source: llama.cpp's `llama-vocab.cpp`, which states each pre-tokenizer's regular expressions.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from gguf import GGUFWriter, TokenType
from transformers import AutoTokenizer

from qarl.sync.gguf.errors import GgufError

_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"
_BYTES = "ByteLevel"
_GPT2_BYTES = "ByteLevel with GPT-2's words"
_DIGITS = "Digits"

_PRE_TOKENIZERS: Mapping[tuple[tuple[str, ...], bool], str] = {
    ((_GPT2_BYTES,), False): "gpt-2",
    ((_DIGITS, _GPT2_BYTES), False): "smollm",
    ((_QWEN2, _BYTES), False): "qwen2",
    ((_LLAMA3, _BYTES), True): "llama-bpe",
    ((_LLAMA3, _BYTES), False): "smaug-bpe",
}
"""(Steps of a pre-tokenizer, whether words in the vocabulary need no merges) → llama.cpp's name."""
_SPACE = "▁"
_REPLACES_SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
_SPLITS_AT_SPACES = {
    "type": "Split",
    "pattern": {"String": " "},
    "behavior": "MergedWithPrevious",
    "invert": False,
}
"""Pre-tokenizer of Gemma, which finds no space after `_REPLACES_SPACES`."""
_PUTS_SPACES = {
    "type": "Metaspace",
    "replacement": _SPACE,
    "prepend_scheme": "always",
    "split": False,
}
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
"""Fields of a file for tokens that end an answer."""


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer in a GGUF file's terms. Lists have one entry per row of the embedding."""

    model: str
    """Kind of tokenizer: gpt2 (byte-level BPE) or llama (SentencePiece BPE)."""
    pre: str
    """llama.cpp's name of the pre-tokenizer."""
    tokens: list[str]
    """Texts of tokens."""
    types: list[TokenType]
    """Types of tokens."""
    merges: list[str] | None
    """Merges of byte-level BPE, best first, as "left right"; None for SentencePiece."""
    scores: list[float] | None
    """Scores of SentencePiece, higher merges first; None for byte-level BPE."""
    adds_space: bool
    """True if a space is put before a text, and after every special token."""
    adds_bos: bool
    """True if a sequence without a chat template begins with the BOS token."""
    adds_eos: bool
    """True if a sequence without a chat template ends with the EOS token."""
    special: Mapping[str, int]
    """Field of a file, such as "bos_token_id" → token id."""
    ends: tuple[int, ...]
    """Ids of tokens that end an answer."""
    chat_template: str | None
    """Chat template, in Jinja; None if the tokenizer has none."""

    def write(self, writer: GGUFWriter) -> None:
        """Add the tokenizer to a file."""
        writer.add_tokenizer_model(self.model)
        writer.add_tokenizer_pre(self.pre)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.types)
        if self.merges is not None:
            writer.add_token_merges(self.merges)
        if self.scores is not None:
            writer.add_token_scores(self.scores)
            writer.add_add_space_prefix(self.adds_space)
        for name, token in self.special.items():
            writer.add_uint32(f"tokenizer.ggml.{name}", token)
        writer.add_add_bos_token(self.adds_bos)
        writer.add_add_eos_token(self.adds_eos)
        if self.chat_template is not None:
            writer.add_chat_template(self.chat_template)


def read_vocabulary(folder: Path, rows: int) -> Vocabulary:
    """Return the tokenizer of an export.

    rows: rows of the embedding. Raises `GgufError` for a tokenizer that llama.cpp does not have.
    """
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        _refuse(folder, f"it is a {type(tokenizer).__name__} without tokenizer.json")
    tree = json.loads(backend.to_str())
    model = tree["model"]
    if model["type"] != "BPE" or model.get("dropout") or model.get("end_of_word_suffix"):
        _refuse(folder, f"its model is {_shown({**model, 'vocab': '…', 'merges': '…'})}")
    added = {token["id"]: token for token in tree["added_tokens"]}
    for token in added.values():
        if token["lstrip"] or token["rstrip"] or token["single_word"]:
            _refuse(folder, f"its token {token['content']!r} removes spaces or must be a word")
        if token["normalized"] and _SPACE in token["content"]:
            _refuse(folder, f"its token {token['content']!r} is looked for in normalized texts")
    pieces = {text: number for text, number in model["vocab"].items() if number not in added}
    # older files have a merge as one string
    merges = [m.split(" ", 1) if isinstance(m, str) else m for m in model["merges"]]
    empty = tokenizer("")["input_ids"]
    special, ends = _special_tokens(tokenizer, folder)
    scores = adds_space = None
    if model.get("byte_fallback"):
        adds_space = _sentencepiece_space(folder, tree)
        by_piece = _scores(folder, pieces, merges)
        scores = [0.0] * rows
        for text, number in pieces.items():
            if number < rows:
                scores[number] = by_piece[text]
    return Vocabulary(
        model="gpt2" if scores is None else "llama",
        pre=_pre_tokenizer(folder, tree) if scores is None else "default",
        tokens=_texts(folder, pieces, added, rows),
        types=_types(pieces, added, rows),
        merges=[" ".join(pair) for pair in merges] if scores is None else None,
        scores=scores,
        adds_space=bool(adds_space),
        adds_bos=empty[:1] == [tokenizer.bos_token_id],
        adds_eos=len(empty) > 0 and empty[-1] == tokenizer.eos_token_id != tokenizer.bos_token_id,
        special=special,
        ends=ends,
        chat_template=_template(tokenizer),
    )


def _refuse(folder: Path, what: str) -> NoReturn:
    known = ", ".join([*_PRE_TOKENIZERS.values(), "llama (SentencePiece)"])
    raise GgufError(
        f"the tokenizer of {str(folder)!r} is not one that QaRL knows in llama.cpp: {what}. Known"
        f" are {known}; with another one llama.cpp would read some texts as other tokens. Serve the"
        " export with `qarl serve`"
    )


def _shown(tree: Any) -> str:
    return json.dumps(tree, ensure_ascii=False)


def _steps(
    part: Mapping[str, Any] | None,
    inner: str,
) -> list[Mapping[str, Any]]:
    """Return the steps of a normalizer or pre-tokenizer, with sequences taken apart.

    inner: field that has a sequence's steps.
    """
    if part is None:
        return []
    if part["type"] != "Sequence":
        return [part]
    return [step for each in part[inner] for step in _steps(each, inner)]


def _pre_tokenizer(folder: Path, tree: Mapping[str, Any]) -> str:
    """Return llama.cpp's name of a byte-level tokenizer's pre-tokenizer. Raises `GgufError`."""
    # llama.cpp does not normalize: it reads a text that is in NFC already as transformers does
    if any(step["type"] != "NFC" for step in _steps(tree["normalizer"], "normalizers")):
        _refuse(folder, f"its normalizer is {_shown(tree['normalizer'])}")
    steps = []
    for step in _steps(tree["pre_tokenizer"], "pretokenizers"):
        if step["type"] == "ByteLevel" and not step["add_prefix_space"]:
            steps.append(_GPT2_BYTES if step["use_regex"] else _BYTES)
        elif step["type"] == "Digits" and step["individual_digits"]:
            steps.append(_DIGITS)
        elif step["type"] == "Split" and step["behavior"] == "Isolated" and not step["invert"]:
            steps.append(step["pattern"].get("Regex", "a fixed text"))
        else:
            steps.append(_shown(step))
    name = _PRE_TOKENIZERS.get((tuple(steps), bool(tree["model"].get("ignore_merges"))))
    if name is None:
        _refuse(folder, f"its pre-tokenizer is {_shown(tree['pre_tokenizer'])}")
    return name


def _sentencepiece_space(folder: Path, tree: Mapping[str, Any]) -> bool:
    """Return whether a SentencePiece tokenizer puts a space before a text. Raises `GgufError`.

    llama.cpp then also puts one after every special token, as the normalizer `Prepend` does.
    """
    steps = _steps(tree["normalizer"], "normalizers")
    steps += _steps(tree["pre_tokenizer"], "pretokenizers")
    prepends = [step for step in steps if step == {"type": "Prepend", "prepend": _SPACE}]
    if steps == [_PUTS_SPACES]:
        return True
    others = [step for step in steps if step not in prepends]
    if others not in ([_REPLACES_SPACES], [_REPLACES_SPACES, _SPLITS_AT_SPACES]):
        _refuse(folder, f"it treats spaces by {_shown(steps)}")
    return bool(prepends)


def _scores(
    folder: Path, pieces: Mapping[str, int], merges: Iterable[list[str]]
) -> dict[str, float]:
    """Return SentencePiece's score of each piece: minus the rank of the first merge that makes it.

    llama.cpp merges whatever pair makes a known piece, best score first; transformers goes through
    a list of pairs. Raises `GgufError` unless the list has every such pair, ordered by piece.
    """
    ranks: dict[str, int] = {}
    pairs: set[tuple[str, str]] = set()
    last = None
    for left, right in merges:
        piece = left + right
        if piece != last and piece in ranks:
            _refuse(folder, f"its merges that make {piece!r} are not beside each other")
        ranks.setdefault(piece, len(ranks))
        pairs.add((left, right))
        last = piece
    for piece in pieces:
        for cut in range(1, len(piece)):
            pair = (piece[:cut], piece[cut:])
            if pair not in pairs and all(part in pieces for part in pair) and not _is_byte(piece):
                _refuse(folder, f"its merges lack {pair!r}, which llama.cpp would merge")
    return {piece: -float(ranks.get(piece, len(ranks))) for piece in pieces}


def _is_byte(piece: str) -> bool:
    return len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">")


def _texts(
    folder: Path, pieces: Mapping[str, int], added: Mapping[int, Mapping[str, Any]], rows: int
) -> list[str]:
    """Return the text of each token; rows of the embedding without a token get a name.

    Raises `GgufError` if a token has no row.
    """
    names = {number: text for text, number in pieces.items()}
    names |= {number: token["content"] for number, token in added.items()}
    beyond = max(names)
    if beyond >= rows:
        raise GgufError(
            f"the tokenizer of {str(folder)!r} has token {beyond} ({names[beyond]!r}), and the"
            f" model's embedding only {rows} rows; llama.cpp needs a row for each"
        )
    return [names.get(number, f"[PAD{number}]") for number in range(rows)]


def _types(
    pieces: Mapping[str, int], added: Mapping[int, Mapping[str, Any]], rows: int
) -> list[TokenType]:
    """Return the type of each token, in the order of their ids."""
    types = [TokenType.UNUSED] * rows
    for text, number in pieces.items():
        types[number] = TokenType.BYTE if _is_byte(text) else TokenType.NORMAL
    for number, token in added.items():
        types[number] = TokenType.CONTROL if token["special"] else TokenType.USER_DEFINED
    return types


def _special_tokens(
    tokenizer: Any,
    folder: Path,
) -> tuple[dict[str, int], tuple[int, ...]]:
    """Return field of a file → token id, and the ids that end an answer.

    These are the tokenizer's EOS token and those of generation_config.json, because vLLM stops at
    both. Raises `GgufError` if there are more than a file has fields for.
    """
    file = folder / "generation_config.json"
    settings = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    listed = settings.get("eos_token_id")
    listed = [listed] if isinstance(listed, int) else listed or []
    own = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    ends = tuple(dict.fromkeys([*own, *listed]))
    if len(ends) > len(_ENDS):
        raise GgufError(
            f"{str(file)!r} has {len(ends)} tokens that end an answer ({ends}); a GGUF file has"
            f" fields for {len(_ENDS)}: remove those that the model never writes"
        )
    others = {
        "bos_token_id": tokenizer.bos_token_id,
        "unknown_token_id": tokenizer.unk_token_id,
        "padding_token_id": tokenizer.pad_token_id,
    }
    special = {name: token for name, token in others.items() if token is not None}
    return {**special, **dict(zip(_ENDS, ends, strict=False))}, ends


def _template(tokenizer: Any) -> str | None:
    """Return the chat template; of several named ones, the default."""
    template = tokenizer.chat_template
    return template.get("default") if isinstance(template, dict) else template
