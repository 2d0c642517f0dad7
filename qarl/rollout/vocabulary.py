"""Check that token ids have a row in the model's embedding.

A tokenizer may have tokens that were added without resizing the model. Looking one up ends in an
IndexError on CPUs and in a device-side assert, which takes the process with it, on GPUs.

This module imports neither torch nor vllm.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qarl.configs.errors import ModelError
from qarl.quant.checkpoint.settings import embedding_rows


@dataclass(frozen=True)
class Vocabulary:
    """The token ids that a model can look up."""

    folder: str
    """Folder of the model, for messages."""
    rows: int | None
    """Number of rows of its embedding; None if it is unknown, and nothing is refused then."""

    @classmethod
    def of(cls, folder: Path) -> "Vocabulary":
        """Return the vocabulary of a model folder, by its config.json."""
        return cls(str(folder), embedding_rows(folder))

    def has(self, token: int) -> bool:
        """Return whether a token id has a row."""
        return token >= 0 and (self.rows is None or token < self.rows)

    def require(self, sequences: Iterable[Sequence[int]], what: str, tokenizer: Any) -> None:
        """Raise `ModelError` if a sequence has an id without a row, naming id, token and rows.

        Args:
            sequences: token ids.
            what: words for what the sequences are, such as "the prompt of problem 'p'".
            tokenizer: transformers' tokenizer, for the token's text.
        """
        for ids in sequences:
            if not ids or (self.has(max(ids)) and self.has(min(ids))):
                continue
            token = next(token for token in ids if not self.has(token))
            known = 0 <= token < len(tokenizer)
            text = f"the token {tokenizer.convert_ids_to_tokens(token)!r} (" if known else "("
            raise ModelError(
                f"{what} has {text}id {token}), and the embedding of {self.folder!r} has"
                f" {self.rows} rows, for ids below {self.rows}. If the token was added to the"
                " tokenizer, add its row, too: model.resize_token_embeddings(len(tokenizer)) and"
                " save_pretrained in transformers; or remove it from chat template,"
                " system prompt and texts"
            )
