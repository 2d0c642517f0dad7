"""Tool calls in what a policy said, and their results in the words of its chat template.

A template writes whole conversations. Of what it writes, the part between a turn that calls tools and the next is what
is appended here, with the results in their places, as text in which no special token is read.
"""

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qarl.configs.errors import ConfigError, ModelError
from qarl.configs.words import did_you_mean
from qarl.rollout.types import Completion

_TURN, _RESULT = "«turn»", "«result {}»"
_QUOTED = 'a"b'


@dataclass(frozen=True)
class ToolCall:
    """name: "" for a call that cannot be read. arguments: of the tool."""

    name: str
    arguments: dict[str, Any]


class ToolTurns:
    """One tokenizer's way to call tools. parser: vLLM's, by name. template: arguments of the chat template, `tools`
    among them.

    Raises `ConfigError` for a parser that vLLM does not have, or that this tokenizer cannot use, and `ModelError` for a
    template that cannot be continued after a call.
    """

    def __init__(self, tokenizer: Any, parser: str, template: Mapping[str, Any]):
        self._tokenizer, self._template = tokenizer, template
        added = tokenizer.added_tokens_decoder.items()
        self._special = {*tokenizer.all_special_ids, *(number for number, token in added if token.special)}
        self._parser, self._request = _parser(tokenizer, parser, template["tools"])
        self._known: dict[tuple[str, ...], tuple[list[int], list[list[int]]]] = {}
        self._written = self._way_of_results()
        self._parts(("a", "b"))

    def calls(self, turn: Completion) -> list[ToolCall]:
        """What a turn calls, in order. A turn that was cut off calls nothing."""
        if turn.truncated:
            return []
        text = self._tokenizer.decode(turn.token_ids, skip_special_tokens=False)
        try:
            extracted = self._parser.extract_tool_calls(text, self._request)
            calls = [_read(call.function) for call in extracted.tool_calls]
        except Exception:  # whatever a parser makes of what a policy wrote
            return [ToolCall("", {})]
        mark = getattr(self._parser, "tool_call_start_token", None)
        return calls or ([ToolCall("", {})] if mark and mark in text else [])

    def reply(self, turn: Completion, calls: Sequence[ToolCall], results: Sequence[str]) -> tuple[int, ...]:
        """The tokens that follow a turn whose calls had these results, up to where the policy goes on."""
        end, parts = self._parts(tuple(call.name for call in calls))
        tokens = [*(() if turn.token_ids[-1] in self._special else end), *parts[0]]
        for result, part in zip(results, parts[1:], strict=True):
            text = self._written(result.encode(errors="replace").decode())  # a half of a pair has no UTF-8
            tokens += self._tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
            tokens += part
        return tuple(tokens)

    def _parts(self, names: tuple[str, ...]) -> tuple[list[int], list[list[int]]]:
        """The token that ends a turn, and what the template writes after it, around a result for each name."""
        if names not in self._known:
            self._known[names] = self._parts_of(names)
        return self._known[names]

    def _parts_of(self, names: tuple[str, ...]) -> tuple[list[int], list[list[int]]]:
        places = [_RESULT.format(number) for number in range(len(names))]
        turn, whole = self._rendered(names), self._rendered(names, places)
        if not whole.startswith(turn):
            raise self._cannot("it writes a turn anew once it has results")
        ending = self._encode(turn[turn.rindex(_TURN) + len(_TURN) :])
        special = [place for place, token in enumerate(ending) if token in self._special]
        if not special:
            raise self._cannot("no special token ends a turn")
        between = re.split("|".join(map(re.escape, places)), whole[len(turn) :])
        if len(between) != len(places) + 1:
            raise self._cannot("it does not write each result once, in their order")
        parts = [self._encode(part) for part in between]
        return [ending[special[-1]]], [ending[special[-1] + 1 :] + parts[0], *parts[1:]]

    def _way_of_results(self) -> Callable[[str], str]:
        """Some templates write results as JSON."""
        whole = self._rendered(("a",), [_QUOTED])
        if _QUOTED in whole:
            return lambda result: result
        if json.dumps(_QUOTED)[1:-1] in whole:
            return lambda result: json.dumps(result, ensure_ascii=False)[1:-1]
        raise self._cannot("it does not write a result as it is")

    def _rendered(self, names: Sequence[str], results: Sequence[str] | None = None) -> str:
        """A chat in which the policy calls tools, up to that turn, or with results up to the next."""
        ids = [f"call{number:05d}" for number in range(len(names))]
        named = list(zip(names, ids, strict=True))
        calls = [
            {"type": "function", "id": call, "function": {"name": name or "unknown", "arguments": {}}}
            for name, call in named
        ]
        chat: list[dict[str, Any]] = [{"role": "user", "content": "?"}]
        chat += [{"role": "assistant", "content": _TURN, "tool_calls": calls}]
        for (name, call), result in zip(named, results or (), strict=results is not None):
            chat += [{"role": "tool", "name": name, "tool_call_id": call, "content": result}]
        arguments = {"tokenize": False, "add_generation_prompt": results is not None, **self._template}
        try:
            return self._tokenizer.apply_chat_template(chat, **arguments)
        except Exception as error:  # what a template raises is its own
            raise self._cannot(f"{type(error).__name__}: {error}") from error

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]

    def _cannot(self, why: str) -> ModelError:
        return ModelError(
            f"the chat template of {self._tokenizer.name_or_path!r} cannot be continued after a tool call: {why}; mend "
            "chat_template in its tokenizer_config.json or chat_template.jinja, or write task.rollout by hand"
        )


def _parser(tokenizer: Any, name: str, tools: Sequence[dict[str, Any]]) -> tuple[Any, Any]:
    """vLLM's parser, and the request that it is given."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    names = ToolParserManager.list_registered()
    if name not in names:
        raise ConfigError(f"task.tool_parser {name!r} must be one of {', '.join(names)}{did_you_mean(name, names)}")
    parser = ToolParserManager.get_tool_parser(name)
    logging.getLogger(parser.__module__).disabled = True  # it logs a traceback for each call that it cannot read
    request = ChatCompletionRequest.model_validate(
        {"messages": [{"role": "user", "content": "?"}], "tools": list(tools)}
    )
    try:
        known: Any = request.tools
        return parser(tokenizer, known), request
    except Exception as error:  # of tokens that a tokenizer lacks
        raise ConfigError(
            f"task.tool_parser {name!r} cannot be used with the tokenizer of {tokenizer.name_or_path!r}: {error}; give "
            "the parser of this model's family"
        ) from error


def _read(function: Any) -> ToolCall:
    arguments = json.loads(function.arguments)
    return ToolCall(function.name, arguments) if isinstance(arguments, dict) else ToolCall("", {})
