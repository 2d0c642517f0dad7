"""Tool calls in what a policy said, and what is said to it next, in the words of its chat template.

A template writes whole conversations. Of what it writes, the part between a turn and the next is
what is appended here, with the tools' results and the user's words in their places, as text in
which no special token is read.
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

_TURN, _PLACE = "«turn»", "«said {}»"
_QUOTED = 'a"b'


@dataclass(frozen=True)
class ToolCall:
    """name: "" for a call that cannot be read. arguments: of the tool."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Said:
    """text: of a tool, the result of the turn's call number `call`; None: of the user."""

    text: str
    call: int | None = None


class ToolTurns:
    """One tokenizer's way to call tools. parser: vLLM's, by name. template: arguments of the chat
    template, with `tools` where there are some.

    Raises `ConfigError` for a parser that vLLM does not have, or that this tokenizer cannot use,
    and `ModelError` for a template that cannot be continued after a turn.
    """

    def __init__(self, tokenizer: Any, parser: str, template: Mapping[str, Any]):
        self._tokenizer, self._template = tokenizer, template
        added = tokenizer.added_tokens_decoder.items()
        self._special = {
            *tokenizer.all_special_ids,
            *(number for number, token in added if token.special),
        }
        self._parts = cache(self._written_parts)
        self._parser = None
        if tools := template.get("tools"):
            self._parser, self._request = _parser(tokenizer, parser, tools)
            self._written = self._way_of_results()
            self._parts(("a", "b"), (0, 1))

    def read(self, turn: Completion) -> tuple[str, list[ToolCall]]:
        """What a turn says beside its calls, and these, in order. A turn that was cut off calls
        nothing.
        """
        if turn.truncated or self._parser is None:
            return turn.text, []
        text = self._tokenizer.decode(turn.token_ids, skip_special_tokens=False)
        try:
            extracted = self._parser.extract_tool_calls(text, self._request)
            calls = [_read(call.function) for call in extracted.tool_calls]
        except Exception:  # whatever a parser makes of what a policy wrote
            return turn.text, [ToolCall("", {})]
        if calls:
            return extracted.content or "", calls
        mark = getattr(self._parser, "tool_call_start_token", None)
        return turn.text, [ToolCall("", {})] if mark and mark in text else []

    def reply(
        self, turn: Completion, calls: Sequence[ToolCall], said: Sequence[Said]
    ) -> tuple[int, ...]:
        """The tokens that follow a turn which called these, up to where the policy goes on. Raises
        `ModelError` where the template cannot be continued so.
        """
        end, parts = self._parts(
            tuple(call.name for call in calls), tuple(words.call for words in said)
        )
        tokens = [*(() if turn.token_ids[-1] in self._special else end), *parts[0]]
        for words, part in zip(said, parts[1:], strict=True):
            # a half of a pair has no UTF-8
            text = words.text.encode(errors="replace").decode()
            text = text if words.call is None else self._written(text)
            tokens += self._tokenizer(text, add_special_tokens=False, split_special_tokens=True)[
                "input_ids"
            ]
            tokens += part
        return tuple(tokens)

    def _written_parts(
        self, names: tuple[str, ...], said: tuple[int | None, ...]
    ) -> tuple[list[int], list[list[int]]]:
        """The token that ends a turn which calls these, and what the template writes after it,
        around what is said.
        """
        places = [_PLACE.format(number) for number in range(len(said))]
        turn = self._rendered(names)
        whole = self._rendered(
            names, [Said(place, call) for place, call in zip(places, said, strict=True)]
        )
        ending = turn[turn.rindex(_TURN) + len(_TURN) :]
        _, _, after = whole.rpartition(_TURN)
        # Once a user speaks, some templates drop earlier thoughts, which stay in the tokens that
        # were sampled.
        if not after.startswith(ending) or (None not in said and not whole.startswith(turn)):
            raise self._cannot("it writes a turn anew once something is said to it")
        tokens = self._encode(ending)
        special = [place for place, token in enumerate(tokens) if token in self._special]
        if not special:
            raise self._cannot("no special token ends a turn")
        between = re.split("|".join(map(re.escape, places)), after[len(ending) :])
        if len(between) != len(places) + 1:
            raise self._cannot("it does not write each result once, in their order")
        parts = [self._encode(part) for part in between]
        return [tokens[special[-1]]], [tokens[special[-1] + 1 :] + parts[0], *parts[1:]]

    def _way_of_results(self) -> Callable[[str], str]:
        """Some templates write results as JSON."""
        whole = self._rendered(("a",), [Said(_QUOTED, 0)])
        if _QUOTED in whole:
            return lambda result: result
        if json.dumps(_QUOTED)[1:-1] in whole:
            return lambda result: json.dumps(result, ensure_ascii=False)[1:-1]
        raise self._cannot("it does not write a result as it is")

    def _rendered(self, names: Sequence[str], said: Sequence[Said] = ()) -> str:
        """A chat in which the policy calls tools, up to that turn, or with what is said then up to
        the next.
        """
        called = [(name, f"call{number:05d}") for number, name in enumerate(names)]
        calls = [
            {
                "type": "function",
                "id": call,
                "function": {"name": name or "unknown", "arguments": {}},
            }
            for name, call in called
        ]
        chat: list[dict[str, Any]] = [{"role": "user", "content": "?"}]
        chat += [
            {
                "role": "assistant",
                "content": _TURN,
                **({"tool_calls": calls} if calls else {}),
            }
        ]
        for words in said:
            if words.call is None:
                chat += [{"role": "user", "content": words.text}]
            else:
                name, call = called[words.call]
                chat += [
                    {
                        "role": "tool",
                        "name": name,
                        "tool_call_id": call,
                        "content": words.text,
                    }
                ]
        arguments = {
            "tokenize": False,
            "add_generation_prompt": bool(said),
            **self._template,
        }
        try:
            return self._tokenizer.apply_chat_template(chat, **arguments)
        except Exception as error:  # what a template raises is its own
            raise self._cannot(f"{type(error).__name__}: {error}") from error

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]

    def _cannot(self, why: str) -> ModelError:
        return ModelError(
            f"the chat template of {self._tokenizer.name_or_path!r} cannot be continued after a"
            f" turn: {why}; mend chat_template in its tokenizer_config.json or chat_template.jinja,"
            " or write task.rollout by hand"
        )


def _parser(tokenizer: Any, name: str, tools: Sequence[dict[str, Any]]) -> tuple[Any, Any]:
    """vLLM's parser, and the request that it is given."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    names = ToolParserManager.list_registered()
    if name not in names:
        raise ConfigError(
            f"task.tool_parser {name!r} must be one of"
            f" {', '.join(names)}{did_you_mean(name, names)}"
        )
    parser = ToolParserManager.get_tool_parser(name)
    # it logs a traceback for each call that it cannot read
    logging.getLogger(parser.__module__).disabled = True
    messages = [{"role": "user", "content": "?"}]
    request = ChatCompletionRequest.model_validate({"messages": messages, "tools": list(tools)})
    try:
        known: Any = request.tools
        return parser(tokenizer, known), request
    except Exception as error:  # of tokens that a tokenizer lacks
        raise ConfigError(
            f"task.tool_parser {name!r} cannot be used with the tokenizer of"
            f" {tokenizer.name_or_path!r}: {error}; give the parser of this model's family"
        ) from error


def _read(function: Any) -> ToolCall:
    arguments = json.loads(function.arguments)
    return ToolCall(function.name, arguments) if isinstance(arguments, dict) else ToolCall("", {})
