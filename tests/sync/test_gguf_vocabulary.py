"""A tokenizer becomes llama.cpp's by what it does, and an unknown one is refused.

Blind spot: that llama.cpp's code of a pre-tokenizer splits as its name promises is measured by
`python -m benchmarks.gguf`, not here.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from gguf import TokenType
from tokenizers import (
    Tokenizer,
    models,
    normalizers,
    pre_tokenizers,
)
from tokenizers.processors import TemplateProcessing
from transformers import AddedToken, PreTrainedTokenizerFast

from qarl.sync.gguf.errors import GgufError
from qarl.sync.gguf.vocabulary import Vocabulary, read_vocabulary
from tests.support.gguf_models import (
    BYTES,
    CHATML,
    GPT2,
    LLAMA3,
    QWEN2,
    VOCABULARY,
    byte_level,
    splits,
)

DIGITS = pre_tokenizers.Digits(individual_digits=True)


def saved(tokenizer: PreTrainedTokenizerFast, folder: Path) -> Vocabulary:
    tokenizer.save_pretrained(folder)
    return read_vocabulary(folder, VOCABULARY)


@pytest.mark.parametrize(
    ("tokenizer", "name"),
    [
        (byte_level(GPT2), "gpt-2"),
        (byte_level(pre_tokenizers.Sequence([DIGITS, GPT2])), "smollm"),
        (byte_level(splits(QWEN2), normalizers.NFC()), "qwen2"),
        (byte_level(splits(QWEN2)), "qwen2"),
        (byte_level(splits(LLAMA3), ignore_merges=True), "llama-bpe"),
        (byte_level(splits(LLAMA3)), "smaug-bpe"),
    ],
)
def test_a_pre_tokenizer_is_recognized_by_its_steps(
    tokenizer: PreTrainedTokenizerFast, name: str, tmp_path: Path
):
    vocabulary = saved(tokenizer, tmp_path)
    assert (vocabulary.model, vocabulary.pre) == ("gpt2", name)


@pytest.mark.parametrize(
    "tokenizer",
    [
        byte_level(pre_tokenizers.Sequence([DIGITS, BYTES])),
        byte_level(pre_tokenizers.ByteLevel(add_prefix_space=True)),
        byte_level(splits(QWEN2), normalizers.NFKC()),
        byte_level(splits(QWEN2.replace(r"\p{N}|", r"\p{N}{1,2}|"))),
        byte_level(splits(QWEN2), ignore_merges=True),
        byte_level(GPT2, normalizers.Lowercase()),
    ],
    ids=["digits", "prefix", "nfkc", "pairs", "merges", "lowercase"],
)
def test_an_unknown_one_is_refused_with_the_known_names(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
):
    with pytest.raises(GgufError, match="is not one that QaRL knows") as error:
        saved(tokenizer, tmp_path)
    assert "gpt-2, smollm, qwen2, llama-bpe, smaug-bpe, llama (SentencePiece)" in str(error.value)


def test_tokens_have_their_ids_types_and_merges(tmp_path: Path):
    """Rows of the embedding without a token are named and unused."""
    tokenizer: Any = byte_level(GPT2)
    tokenizer.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    vocabulary = saved(tokenizer, tmp_path)
    assert len(vocabulary.tokens) == len(vocabulary.types) == VOCABULARY
    for text, number in tokenizer.get_vocab().items():
        assert vocabulary.tokens[number] == text
    assert vocabulary.types[:3] == [TokenType.CONTROL] * 3
    assert vocabulary.types[tokenizer.convert_tokens_to_ids("<tool>")] == TokenType.USER_DEFINED
    assert vocabulary.types[len(tokenizer)] == TokenType.UNUSED
    assert vocabulary.tokens[-1] == f"[PAD{VOCABULARY - 1}]"
    tree = json.loads(tokenizer.backend_tokenizer.to_str())
    assert vocabulary.merges == [" ".join(pair) for pair in tree["model"]["merges"]]
    assert vocabulary.chat_template == CHATML


def test_a_token_without_a_row_of_the_embedding_is_refused(tmp_path: Path):
    tokenizer: Any = byte_level(GPT2)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(GgufError, match=f"has token {len(tokenizer) - 1} .*only 300 rows"):
        read_vocabulary(tmp_path, 300)


def test_a_token_that_removes_spaces_is_refused(tmp_path: Path):
    tokenizer: Any = byte_level(GPT2)
    tokenizer.add_tokens([AddedToken("<mask>", lstrip=True)])
    with pytest.raises(GgufError, match="its token '<mask>' removes spaces"):
        saved(tokenizer, tmp_path)


@pytest.mark.parametrize(
    ("listed", "ends"), [(2, (2,)), ([2, 0], (2, 0)), ([0, 1], (2, 0, 1)), (None, (2,))]
)
def test_tokens_that_end_an_answer_are_the_tokenizers_and_the_generation_configs(
    listed: Any, ends: tuple[int, ...], tmp_path: Path
):
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": listed}))
    vocabulary = saved(byte_level(GPT2), tmp_path)
    fields = ("eos_token_id", "eot_token_id", "eom_token_id")
    assert vocabulary.ends == ends
    assert [vocabulary.special[field] for field in fields[: len(ends)]] == list(ends)
    assert not set(fields[len(ends) :]) & vocabulary.special.keys()


def test_more_ends_than_a_file_has_fields_for_are_refused(tmp_path: Path):
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 1, 3]}))
    with pytest.raises(GgufError, match="has 4 tokens that end an answer"):
        saved(byte_level(GPT2), tmp_path)


@pytest.mark.parametrize("adds", [True, False])
def test_bos_is_added_if_the_tokenizer_adds_it(adds: bool, tmp_path: Path):
    tokenizer = byte_level(GPT2, bos_token="<|im_start|>")
    if adds:
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
        )
    vocabulary = saved(tokenizer, tmp_path)
    assert vocabulary.adds_bos == adds
    assert not vocabulary.adds_eos
    assert vocabulary.special["bos_token_id"] == 1


def sentencepiece(merges: list[tuple[str, str]], *steps: Any) -> PreTrainedTokenizerFast:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "a", "b", "c", *dict.fromkeys(left + right for left, right in merges)]
    model = models.BPE(
        vocab={piece: number for number, piece in enumerate(pieces)},
        merges=merges,
        unk_token="<unk>",
        byte_fallback=True,
        fuse_unk=True,
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(list(steps))
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", bos_token="<s>")


PREPEND = normalizers.Prepend("▁")
SPACES = normalizers.Replace(" ", "▁")
MERGES = [
    ("a", "b"),
    ("▁", "a"),
    ("▁a", "b"),
    ("▁", "ab"),
]


def test_sentencepiece_scores_fall_with_the_rank_of_a_piece(tmp_path: Path):
    """Both merges that make ▁ab have one score, because llama.cpp scores pieces."""
    vocabulary = saved(sentencepiece(MERGES, PREPEND, SPACES), tmp_path)
    assert vocabulary.scores is not None
    score = dict(zip(vocabulary.tokens, vocabulary.scores, strict=True))
    assert (vocabulary.model, vocabulary.pre, vocabulary.adds_space) == ("llama", "default", True)
    assert (score["ab"], score["▁a"], score["▁ab"]) == (0.0, -1.0, -2.0)
    assert vocabulary.types[vocabulary.tokens.index("<0x0A>")] == TokenType.BYTE
    assert vocabulary.merges is None


def test_sentencepiece_without_a_prefix_adds_no_space(tmp_path: Path):
    assert not saved(sentencepiece(MERGES, SPACES), tmp_path).adds_space


def test_gemmas_split_at_spaces_that_are_no_more_changes_nothing(tmp_path: Path):
    tokenizer = sentencepiece(MERGES, SPACES)
    split = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.backend_tokenizer.pre_tokenizer = split
    assert not saved(tokenizer, tmp_path).adds_space
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    (tmp_path / "other").mkdir()
    with pytest.raises(GgufError, match="it treats spaces by"):
        saved(tokenizer, tmp_path / "other")


def test_a_token_that_is_looked_for_in_normalized_texts_is_refused(tmp_path: Path):
    """llama.cpp looks for it in the text as it is."""
    tokenizer = sentencepiece(MERGES, SPACES)
    tokenizer.add_tokens([AddedToken("▁▁", normalized=True, special=False)])
    with pytest.raises(GgufError, match="its token '▁▁' is looked for in normalized texts"):
        saved(tokenizer, tmp_path)


def test_merges_that_llama_cpp_would_do_otherwise_are_refused(tmp_path: Path):
    missing = MERGES[:3]
    with pytest.raises(GgufError, match=r"its merges lack \('▁', 'ab'\)"):
        saved(sentencepiece(missing, PREPEND, SPACES), tmp_path)
    parted = [
        ("▁", "a"),
        ("▁a", "b"),
        ("a", "b"),
        ("▁", "ab"),
    ]
    with pytest.raises(GgufError, match="its merges that make '▁ab' are not beside each other"):
        saved(sentencepiece(parted, PREPEND, SPACES), tmp_path)


def test_another_treatment_of_spaces_is_refused(tmp_path: Path):
    tokenizer = sentencepiece(MERGES, normalizers.NFKC())
    with pytest.raises(GgufError, match="it treats spaces by"):
        saved(tokenizer, tmp_path)


def test_a_word_tokenizer_is_refused(tmp_path: Path):
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    with pytest.raises(GgufError, match=r'its model is \{"type": "WordPiece"'):
        saved(PreTrainedTokenizerFast(tokenizer_object=tokenizer), tmp_path)
