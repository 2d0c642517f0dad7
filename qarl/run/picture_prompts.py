"""Prompts with pictures, as the processor in the model's folder makes them."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qarl.configs.errors import ConfigError, ModelError
from qarl.configs.words import error_text, quoted
from qarl.quant.checkpoint.folder import read_config
from qarl.quant.checkpoint.settings import tower_inputs
from qarl.rollout.picture_processors import load_processor
from qarl.rollout.pictures import open_picture
from qarl.rollout.types import Pictures
from qarl.tasks import Problem
from qarl.tasks.base import PICTURE

_MARK = "qarl"
"""Text whose loss shows that a template takes a message as parts alone."""


class PicturePrompts:
    """Puts pictures into prompts of text, for a model whose processor says how.

    Raises `ModelError` if pictures are asked for and the model does not take them.

    Args:
        folder: the model's folder.
        tokenizer: its tokenizer.
        most: upper bound on the pictures of a prompt (`rollout.pictures`).
    """

    def __init__(self, folder: Path, tokenizer: Any, most: int):
        self._folder = str(folder)
        self._tokenizer = tokenizer
        self._most = most
        self._settings = read_config(folder) if (folder / "config.json").is_file() else {}
        self._takes = "pictures" in tower_inputs(folder)
        if most:
            self._require_pictures()
        self._processor = _processor(folder) if most else None

    def chat(self, problem: Problem) -> list[dict[str, Any]]:
        """Return a problem's conversation for the chat template.

        With pictures, and where the template drops plain text, messages are lists of parts. A
        problem whose messages have no place for its pictures has them before its last turn.
        """
        chat: list[dict[str, Any]] = [dict(message) for message in problem.chat]
        if problem.pictures and not any(PICTURE in message["content"] for message in chat):
            chat[-1]["content"] = PICTURE * len(problem.pictures) + chat[-1]["content"]
        if problem.pictures or self._needs_parts:
            for message in chat:
                if isinstance(message["content"], str):  # a program may give parts already
                    message["content"] = _parts(message["content"])
        return chat

    def expanded(self, problem: Problem, text: str, ids: list[int], special: bool) -> list[int]:
        """Return a prompt's tokens, with as many for each picture as the model has.

        Raises `ConfigError` for pictures that the settings do not allow, and `ModelError` if the
        prompt has more or fewer places for pictures than pictures, or the processor fails.

        Args:
            text: the prompt as text, with one place for each picture.
            ids: its tokens.
            special: whether the tokenizer adds its special tokens.
        """
        self._require_places(problem, ids)
        if not problem.pictures:
            return ids
        assert self._processor is not None
        pictures = [open_picture(picture.contents()) for picture in problem.pictures]
        try:
            inputs = self._processor(text=[text], images=[pictures], add_special_tokens=special)
        except Exception as error:  # a processor may raise anything
            raise ModelError(
                f"the processor of {self._folder!r} does not take the pictures of problem"
                f" {problem.id!r} ({_sizes(pictures)}): {error_text(error)}; change their sizes, or"
                " drop the problem"
            ) from error
        return [int(token) for token in inputs["input_ids"][0]]

    def of(self, problem: Problem, ids: Sequence[int]) -> Pictures | None:
        """Return the pictures of a problem's prompt; None if it has none.

        ids: the prompt's tokens, with one for each picture.
        """
        if not problem.pictures:
            return None
        files = tuple(picture.contents() for picture in problem.pictures)
        return Pictures(files=files, token_ids=tuple(ids))

    @functools.cached_property
    def _place(self) -> int | None:
        """The token that a prompt of text has in the place of a picture; None if unknown.

        It is the processor's. Gemma 3 has others in a prompt with its pictures.
        """
        token = getattr(self._processor, "image_token", None)
        if isinstance(token, str):
            return self._tokenizer.convert_tokens_to_ids(token)
        return self._settings.get("image_token_id", self._settings.get("image_token_index"))

    @functools.cached_property
    def _needs_parts(self) -> bool:
        """Whether the template of a model with pictures drops a message that is plain text."""
        if not self._takes or self._tokenizer.chat_template is None:
            return False
        return not self._shows(_MARK) and self._shows(_parts(_MARK))

    def _shows(self, content: Any) -> bool:
        """Return whether the chat template writes a message's text."""
        message = {"role": "user", "content": content}
        try:
            return _MARK in self._tokenizer.apply_chat_template([message], tokenize=False)
        except Exception:  # a template may raise anything
            return False

    def _require_pictures(self) -> None:
        """Raise `ModelError` if the model's prompts cannot have pictures."""
        kind = self._settings.get("model_type")
        if not self._takes:
            raise ModelError(
                f"rollout.pictures {self._most} with {self._folder!r}, a {kind!r}, which takes text"
                " alone; omit it, or take a model with pictures (docs/guide/pictures.md)"
            )
        if self._tokenizer.chat_template is None:
            raise ModelError(
                f"rollout.pictures {self._most} with {self._folder!r}, whose tokenizer has no chat"
                " template, so that nothing says where a picture stands; take a model with one"
            )

    def _require_places(self, problem: Problem, ids: Sequence[int]) -> None:
        """Raise an error if a prompt's pictures are not allowed, or not as many as its places."""
        count = len(problem.pictures)
        if count > self._most:
            if not self._takes:
                remedy = f"{self._folder!r} takes text alone; drop the column, or take a model"
                remedy += " with pictures (docs/guide/pictures.md)"
            else:
                remedy = f"set rollout.pictures to {count} or more"
            raise ConfigError(
                f"problem {problem.id!r} has {count} pictures, and rollout.pictures allows"
                f" {self._most}: {remedy}"
            )
        token = self._place
        places = sum(number == token for number in ids)
        if self._takes and token is not None and places != count:
            raise ModelError(
                f"the prompt of problem {problem.id!r} has {places} places for pictures and"
                f" {count} pictures ({quoted(problem.question)}); drop the model's token for"
                f" pictures, {self._tokenizer.decode([token])!r}, from its text, or take a chat"
                " template that writes one for each picture"
            )


def _parts(content: str) -> list[dict[str, str]]:
    """Return a message's text as parts, with a picture in place of each `PICTURE`."""
    parts = []
    for number, text in enumerate(content.split(PICTURE)):
        if number:
            parts.append({"type": "image"})
        if text:
            parts.append({"type": "text", "text": text})
    return parts


def _processor(folder: Path) -> Any:
    """Load the processor of a model's folder. Raises `ModelError` if it cannot be loaded."""
    try:
        return load_processor(folder)
    except Exception as error:  # whatever its files make transformers raise
        raise ModelError(
            f"the processor of {str(folder)!r}, which makes prompts with pictures, cannot be"
            f" loaded: {error_text(error)}; check its preprocessor_config.json and"
            " processor_config.json"
        ) from error


def _sizes(pictures: Sequence[Any]) -> str:
    """Return the sizes of pictures, in pixels."""
    return ", ".join(f"{picture.width} × {picture.height}" for picture in pictures)
