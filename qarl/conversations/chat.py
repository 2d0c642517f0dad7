"""Conversations over HTTP, as OpenAI's chat completions: an agent that speaks these is a rollout.

A request that goes on from the one before is the turn's tokens with what is said since behind them;
what came before is not rendered anew, whatever its text says. How turns are sampled is the run's,
and no request may say otherwise.
"""

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from qarl.configs.errors import ConfigError, ModelError, QarlError
from qarl.configs.functions import in_words
from qarl.conversations import Conversation, OutOfRoomError
from qarl.conversations.tools import Said, ToolCall, ToolTurns
from qarl.rollout.types import Completion

_TAKEN = {
    "messages",
    "tools",
    "max_tokens",
    "max_completion_tokens",
    "stream",
    "stream_options",
    "model",
    "user",
}
_USUAL: dict[str, Any] = {
    "n": 1,
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "store": False,
}
"""Fields of a request that may have this value alone."""


Request = tuple[list[dict[str, Any]], list[Any]]
"""Messages, and tools."""


class ChatError(Exception):
    """A request that this conversation does not answer; the message says why."""


class ChatServer:
    """Conversations on loopback, from the first that is served. tokenizer: used here alone. parser:
    vLLM's, of tool calls. template: arguments of the chat template. max_prompt_tokens: of what a
    conversation begins with.
    """

    def __init__(
        self,
        tokenizer: Any,
        parser: str,
        template: Mapping[str, Any],
        max_prompt_tokens: int,
    ):
        self._tokenizer, self._parser, self._template = tokenizer, parser, template
        self._max_prompt_tokens = max_prompt_tokens
        self._ways: dict[str, ToolTurns] = {}
        self._chats: dict[str, _Chat] = {}
        self._runner: web.AppRunner | None = None
        self._starting = asyncio.Lock()

    @asynccontextmanager
    async def serve(self, policy: Conversation) -> AsyncIterator[str]:
        """The base URL at which a conversation is spoken. Raises, at its end, what `ToolTurns`
        did.
        """
        async with self._starting:
            if self._runner is None:
                application = web.Application(client_max_size=2**30)
                application.router.add_post("/{key}/v1/chat/completions", self._completions)
                self._runner = web.AppRunner(application)
                await self._runner.setup()
                await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        key = secrets.token_urlsafe(16)
        chat = self._chats[key] = _Chat(policy, self)
        try:
            yield f"http://127.0.0.1:{self._runner.addresses[0][1]}/{key}/v1"
        except Exception:
            if chat.failure is None:  # else it is what the agent raised for
                raise
        finally:
            del self._chats[key]
        if chat.failure is not None:
            raise chat.failure

    async def close(self) -> None:
        """End the server."""
        if self._runner is not None:
            await self._runner.cleanup()

    def prompt(self, messages: list[dict[str, Any]], tools: list[Any]) -> list[int]:
        """What a conversation begins with. Raises `ModelError` where the template fails,
        `ConfigError` if too long.
        """
        arguments = {
            **self._template,
            "tools": tools or None,
            "tokenize": False,
            "add_generation_prompt": True,
        }
        try:
            text = self._tokenizer.apply_chat_template(messages, **arguments)
        except Exception as error:  # what a template raises is its own
            raise ModelError(
                f"the chat template cannot be applied: {type(error).__name__}: {error}"
            ) from error
        tokens = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(tokens) > self._max_prompt_tokens:
            most = f"above rollout.max_prompt_tokens {self._max_prompt_tokens}; raise it"
            raise ConfigError(
                f"what a conversation begins with has {len(tokens)} tokens, {most} ({text[:80]!r}…)"
            )
        return tokens

    def way(self, tools: list[Any]) -> ToolTurns:
        """How these are called, and what is said next. Raises what `ToolTurns` does."""
        described = json.dumps(tools)
        if described not in self._ways:
            template = {**self._template, "tools": tools} if tools else self._template
            self._ways[described] = ToolTurns(self._tokenizer, self._parser, template)
        return self._ways[described]

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        chat = self._chats.get(request.match_info["key"])
        if chat is None:
            return _error("this conversation has ended", status=404)
        try:
            body = await request.json()
            answer = await chat.answer(body)
        except (ChatError, json.JSONDecodeError) as error:
            return _error(str(error))
        return (
            await _streamed(request, answer, body)
            if body.get("stream")
            else web.json_response(answer)
        )


class _Chat:
    """One conversation. failure: why it cannot go on, whatever the agent does."""

    def __init__(self, policy: Conversation, server: ChatServer):
        self.failure: QarlError | None = None
        self._policy, self._server = policy, server
        self._before: Request = ([], [])
        self._turn: Completion | None = None
        self._calls: list[ToolCall] = []
        self._answer: dict[str, Any] = {}
        self._cut_off = False
        self._one_at_a_time = asyncio.Lock()

    async def answer(self, body: Any) -> dict[str, Any]:
        """The chat completion. Raises `ChatError`, and what `Conversation.generate` does."""
        request, limit = _read(body)
        async with self._one_at_a_time:
            if self._cut_off:
                raise ChatError("no token is left for another turn")
            # an agent that asks again is answered as before
            if request != self._before:
                self._answer = await self._next(request, limit)
                self._before = request
            return self._answer

    async def _next(self, request: Request, limit: int | None) -> dict[str, Any]:
        try:
            way = self._server.way(request[1])
            self._turn = await self._policy.generate(self._said(way, *request), limit)
        # what is not said is nothing, and cut off: the agent ends, and is judged as it is
        except OutOfRoomError:
            self._cut_off = True
            return self._written("", [], "length")
        except QarlError as error:
            self.failure = error
            raise ChatError(str(error)) from error
        text, calls = way.read(self._turn)
        readable = [call for call in calls if call.name]
        self._policy.events["broken_calls"] += len(calls) - len(readable)
        self._policy.events["tool_calls"] += len(calls)
        self._calls = readable
        return self._written(
            text,
            readable,
            "length" if self._turn.truncated else "tool_calls" if readable else "stop",
        )

    def _said(
        self, way: ToolTurns, messages: list[dict[str, Any]], tools: list[Any]
    ) -> tuple[int, ...]:
        """The tokens before the next turn."""
        if self._turn is None:
            self._policy.open(self._server.prompt(messages, tools))
            return ()
        before, known = self._before
        answer, *tail = messages[len(before) :] or [{}]
        if (
            messages[: len(before)] != before
            or tools != known
            or answer.get("role") != "assistant"
            or not tail
        ):
            self._policy.events["rewritten"] += 1
            raise ChatError(
                f"this request does not go on from the {len(before)} messages before it, their"
                " answer and the same tools; a conversation is one line of tokens, of which"
                " nothing is written anew"
            )
        return way.reply(self._turn, self._calls, [self._words(message) for message in tail])

    def _words(self, message: dict[str, Any]) -> Said:
        if message["role"] == "user":
            return Said(message["content"])
        ids = [self._id(number) for number in range(len(self._calls))]
        if message["role"] != "tool" or message.get("tool_call_id") not in ids:
            raise ChatError(
                f"{message!r:.200} follows a turn; there come results of its calls {ids}, and a"
                " user's words"
            )
        return Said(message["content"], ids.index(message["tool_call_id"]))

    def _id(self, call: int) -> str:
        return f"call_{self._policy.turns}_{call}"

    def _written(self, text: str, calls: list[ToolCall], reason: str) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if calls:
            functions = [
                {"name": call.name, "arguments": json.dumps(call.arguments)} for call in calls
            ]
            message["tool_calls"] = [
                {"id": self._id(n), "type": "function", "function": function}
                for n, function in enumerate(functions)
            ]
        whole = len(self._policy.prompt.token_ids) + len(self._policy.token_ids)
        new = 0 if self._cut_off or self._turn is None else len(self._turn.token_ids)
        return {
            "id": f"chat-{self._policy.turns}",
            "object": "chat.completion",
            "created": 0,
            "model": "policy",
            "choices": [{"index": 0, "message": message, "finish_reason": reason}],
            "usage": {
                "prompt_tokens": whole - new,
                "completion_tokens": new,
                "total_tokens": whole,
            },
        }


def _read(body: Any) -> tuple[Request, int | None]:
    """A request's messages and tools, and the most tokens of the turn."""
    try:
        for name, value in body.items():
            if name not in _TAKEN and value not in (None, _USUAL.get(name)):
                raise ChatError(
                    f"{name} {value!r:.80} is not taken: the run says how turns are sampled; leave"
                    " it out"
                )
        messages = [_message(message) for message in body["messages"]]
        if not messages:
            raise ChatError("messages is empty; begin with what the policy is asked")
        limit = body.get("max_completion_tokens") or body.get("max_tokens")
        return (
            messages,
            list(body.get("tools") or ()),
        ), (None if limit is None else int(limit))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ChatError(f"this is no request for a chat completion: {in_words(error)}") from error


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """As a chat template takes it."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        if any(part["type"] != "text" for part in content):
            raise ChatError(
                f"content of {sorted({part['type'] for part in content})} is not taken; give text"
            )
        content = "".join(part["text"] for part in content)
    role = "system" if message["role"] == "developer" else message["role"]
    kept = {
        name: message[name] for name in ("name", "tool_call_id", "tool_calls") if message.get(name)
    }
    return {"role": role, "content": content, **kept}


def _error(words: str, status: int = 400) -> web.Response:
    error = {
        "message": words,
        "type": "invalid_request_error",
        "param": None,
        "code": None,
    }
    return web.json_response({"error": error}, status=status)


async def _streamed(
    request: web.Request, answer: dict[str, Any], body: dict[str, Any]
) -> web.StreamResponse:
    """The whole turn as one event, and why it ended as another."""
    choice, head = (
        answer["choices"][0],
        {**answer, "object": "chat.completion.chunk", "usage": None},
    )
    delta = dict(choice["message"])
    if "tool_calls" in delta:
        delta["tool_calls"] = [{"index": n, **call} for n, call in enumerate(delta["tool_calls"])]
    events = [
        {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        {
            **head,
            "choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}],
        },
    ]
    if (body.get("stream_options") or {}).get("include_usage"):
        events += [{**head, "choices": [], "usage": answer["usage"]}]
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for data in [*map(json.dumps, events), "[DONE]"]:
        await response.write(f"data: {data}\n\n".encode())
    await response.write_eof()
    return response
