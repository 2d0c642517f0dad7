"""Tool calls of a policy, and the answers to them, in the format of the policy's chat template.

A template writes whole conversations. This module appends only what a template writes between one
turn and the next, with the tools' results and the user's text inserted. Special tokens are not
recognized in these.
"""

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from qarl.configs.errors import ConfigError, ModelError
from qarl.configs.words import did_you_mean
from qarl.rollout.types import Completion

_TURN = "«turn»"
_PLACEHOLDER = "«said {}»"
_QUOTED = 'a"b'


@dataclass(frozen=True)
class ToolCall:
    """A tool call in a policy's turn."""

    name: str
    """Name of the tool; "" for a call that cannot be read."""
    arguments: dict[str, Any]
    """Arguments of the tool."""


@dataclass(frozen=True)
class Said:
    """A text for the policy."""

    text: str
    """The text."""
    call: int | None = None
    """Index of the call in the turn whose result this is; None for a user's text."""


class ToolTurns:
    """Reads tool calls in turns, and writes the tokens that follow, for one chat template.

    Args:
        tokenizer: The policy's tokenizer.
        parser: Name of vLLM's parser of tool calls.
        template: Arguments of the chat template, with `tools` if there are any.

    Raises:
        ConfigError: vLLM does not have the parser, or this tokenizer cannot use it.
        ModelError: The template cannot be continued after a turn.
    """

    def __init__(self, tokenizer: Any, parser: str, template: Mapping[str, Any]):
        self._tokenizer = tokenizer
        self._template = template
        self._special = set(tokenizer.all_special_ids)
        for number, token in tokenizer.added_tokens_decoder.items():
            if token.special:
                self._special.add(number)
        self._parts = cache(self._write_parts)
        self._parser = None
        tools = template.get("tools")
        if tools:
            self._parser, self._request = _parser(tokenizer, parser, tools)
            self._write_result = self._result_writer()
            # Fail now, not in a conversation, if two calls cannot be answered.
            self._parts(("a", "b"), (0, 1))

    def read(self, turn: Completion) -> tuple[str, list[ToolCall]]:
        """Return a turn's text without its tool calls, and these calls, in order.

        A turn that was cut off has no calls.
        """
        if turn.truncated or self._parser is None:
            return turn.text, []
        text = self._tokenizer.decode(turn.token_ids, skip_special_tokens=False)
        try:
            extracted = self._parser.extract_tool_calls(text, self._request)
            calls = [_read(call.function) for call in extracted.tool_calls]
        except Exception:  # a parser may raise anything at what a policy wrote
            return turn.text, [ToolCall("", {})]
        if calls:
            return extracted.content or "", calls
        # If the policy began a call that the parser did not read, report a broken call.
        mark = getattr(self._parser, "tool_call_start_token", None)
        return turn.text, [ToolCall("", {})] if mark and mark in text else []

    def reply(
        self, turn: Completion, calls: Sequence[ToolCall], said: Sequence[Said]
    ) -> tuple[int, ...]:
        """Return the tokens between a turn with these calls and the policy's next turn.

        Raises `ModelError` if the template cannot be continued so.
        """
        names = tuple(call.name for call in calls)
        end, parts = self._parts(names, tuple(item.call for item in said))
        tokens = []
        # A turn that was cut off lacks the token that ends it.
        if turn.token_ids[-1] not in self._special:
            tokens += end
        tokens += parts[0]
        for item, part in zip(said, parts[1:], strict=True):
            # Half of a surrogate pair cannot be encoded as UTF-8.
            text = item.text.encode(errors="replace").decode()
            if item.call is not None:
                text = self._write_result(text)
            encoded = self._tokenizer(text, add_special_tokens=False, split_special_tokens=True)
            tokens += encoded["input_ids"]
            tokens += part
        return tuple(tokens)

    def _write_parts(
        self, names: tuple[str, ...], said: tuple[int | None, ...]
    ) -> tuple[list[int], list[list[int]]]:
        """Return what the template writes after a turn, around the texts in `said`.

        Returns:
            The token that ends a turn with these calls, and the tokens before, between and after
            the texts.
        """
        placeholders = [_PLACEHOLDER.format(number) for number in range(len(said))]
        turn = self._rendered(names)
        reply = [Said(text, call) for text, call in zip(placeholders, said, strict=True)]
        chat = self._rendered(names, reply)
        ending = turn[turn.rindex(_TURN) + len(_TURN) :]
        _, _, after = chat.rpartition(_TURN)
        # After a user's text some templates drop earlier thoughts, which stay in the tokens that
        # were sampled.
        if not after.startswith(ending) or (None not in said and not chat.startswith(turn)):
            raise self._cannot("it writes a turn anew once something is said to it")
        tokens = self._encode(ending)
        special = [index for index, token in enumerate(tokens) if token in self._special]
        if not special:
            raise self._cannot("no special token ends a turn")
        between = re.split("|".join(map(re.escape, placeholders)), after[len(ending) :])
        if len(between) != len(placeholders) + 1:
            raise self._cannot("it does not write each result once, in their order")
        first, *others = [self._encode(part) for part in between]
        # The turn ends with its last special token; what follows belongs to the reply.
        end = special[-1]
        return [tokens[end]], [tokens[end + 1 :] + first, *others]

    def _result_writer(self) -> Callable[[str], str]:
        """Return the function that writes a result as the template does, which may be as JSON."""
        chat = self._rendered(("a",), [Said(_QUOTED, 0)])
        if _QUOTED in chat:
            return lambda result: result
        if json.dumps(_QUOTED)[1:-1] in chat:
            return lambda result: json.dumps(result, ensure_ascii=False)[1:-1]
        raise self._cannot("it does not write a result as it is")

    def _rendered(self, names: Sequence[str], said: Sequence[Said] = ()) -> str:
        """Render a chat in which the policy calls tools.

        It ends with that turn or, if `said` is given, where the policy's next turn begins.
        """
        ids = [f"call{number:05d}" for number in range(len(names))]
        turn: dict[str, Any] = {"role": "assistant", "content": _TURN}
        if names:
            functions = [{"name": name or "unknown", "arguments": {}} for name in names]
            turn["tool_calls"] = [
                {"type": "function", "id": call_id, "function": function}
                for call_id, function in zip(ids, functions, strict=True)
            ]
        chat: list[dict[str, Any]] = [{"role": "user", "content": "?"}, turn]
        for item in said:
            if item.call is None:
                chat.append({"role": "user", "content": item.text})
                continue
            chat.append(
                {
                    "role": "tool",
                    "name": names[item.call],
                    "tool_call_id": ids[item.call],
                    "content": item.text,
                }
            )
        arguments = {
            "tokenize": False,
            "add_generation_prompt": bool(said),
            **self._template,
        }
        try:
            return self._tokenizer.apply_chat_template(chat, **arguments)
        except Exception as error:  # a template may raise anything
            raise self._cannot(f"{type(error).__name__}: {error}") from error

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]

    def _cannot(self, why: str) -> ModelError:
        return ModelError(
            f"the chat template of {self._tokenizer.name_or_path!r} cannot be continued after a"
            f" turn: {why}; correct chat_template in its tokenizer_config.json or"
            " chat_template.jinja, or write a task.rollout"
        )


def _parser(
    tokenizer: Any,
    name: str,
    tools: Sequence[dict[str, Any]],
) -> tuple[Any, Any]:
    """Return vLLM's parser, and the request that it needs."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    names = ToolParserManager.list_registered()
    if name not in names:
        raise ConfigError(
            f"task.tool_parser {name!r} must be one of"
            f" {', '.join(names)}{did_you_mean(name, names)}"
        )
    parser = ToolParserManager.get_tool_parser(name)
    # The parser logs a traceback for each call that it cannot read.
    logging.getLogger(parser.__module__).disabled = True
    messages = [{"role": "user", "content": "?"}]
    request = ChatCompletionRequest.model_validate({"messages": messages, "tools": list(tools)})
    try:
        known: Any = request.tools
        return parser(tokenizer, known), request
    except Exception as error:  # the tokenizer lacks tokens that the parser needs
        raise ConfigError(
            f"task.tool_parser {name!r} cannot be used with the tokenizer of"
            f" {tokenizer.name_or_path!r}: {error}; give the parser of this model's family"
        ) from error


def _read(function: Any) -> ToolCall:
    arguments = json.loads(function.arguments)
    return ToolCall(function.name, arguments) if isinstance(arguments, dict) else ToolCall("", {})
