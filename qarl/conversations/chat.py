"""Conversations over HTTP as OpenAI's chat completions: an agent that uses these is a rollout.

A request that continues the one before appends the new messages to the turn's tokens. Earlier
messages are not rendered anew, whatever their text says. The run decides how turns are sampled, and
no request may change that.
"""

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from qarl.configs.errors import ConfigError, ModelError, QarlError
from qarl.configs.functions import describe_error
from qarl.configs.words import quoted
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
"""Fields of a request that are read or ignored."""
_USUAL: dict[str, Any] = {
    "n": 1,
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "store": False,
}
"""Fields of a request that may have only this value."""


Request = tuple[list[dict[str, Any]], list[Any]]
"""(messages, tools)"""


class ChatError(Exception):
    """A request that this conversation does not answer. The message says why."""


class ChatServer:
    """Serves conversations on the loopback interface, from the first call of `serve`.

    Args:
        tokenizer: Tokenizer that only this server uses.
        parser: Name of vLLM's parser of tool calls.
        template: Arguments of the chat template.
        max_prompt_tokens: Upper bound on the tokens that a conversation begins with.
    """

    def __init__(
        self,
        tokenizer: Any,
        parser: str,
        template: Mapping[str, Any],
        max_prompt_tokens: int,
    ):
        self._tokenizer = tokenizer
        self._parser = parser
        self._template = template
        self._max_prompt_tokens = max_prompt_tokens
        self._tool_turns: dict[str, ToolTurns] = {}
        self._chats: dict[str, _Chat] = {}
        self._runner: web.AppRunner | None = None
        self._starting = asyncio.Lock()

    @asynccontextmanager
    async def serve(self, policy: Conversation) -> AsyncIterator[str]:
        """Serve a conversation and yield its base URL.

        Raises the errors of `ToolTurns` at the end.
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
            # After a failure the agent's error is only its consequence.
            if chat.failure is None:
                raise
        finally:
            del self._chats[key]
        if chat.failure is not None:
            raise chat.failure

    async def close(self) -> None:
        """Stop the server."""
        if self._runner is not None:
            await self._runner.cleanup()

    def prompt(
        self,
        messages: list[dict[str, Any]],
        tools: list[Any],
    ) -> list[int]:
        """Return the tokens that a conversation begins with.

        Raises `ModelError` if the template fails, and `ConfigError` if there are too many tokens.
        """
        arguments = {
            **self._template,
            "tools": tools or None,
            "tokenize": False,
            "add_generation_prompt": True,
        }
        try:
            text = self._tokenizer.apply_chat_template(messages, **arguments)
        except Exception as error:  # a template may raise anything
            raise ModelError(
                f"the chat template cannot be applied: {type(error).__name__}: {error}"
            ) from error
        tokens = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(tokens) > self._max_prompt_tokens:
            most = f"above rollout.max_prompt_tokens {self._max_prompt_tokens}; raise it"
            raise ConfigError(
                f"what a conversation begins with has {len(tokens)} tokens, {most} ({quoted(text)})"
            )
        return tokens

    def tool_turns(self, tools: list[Any]) -> ToolTurns:
        """Return the `ToolTurns` of these tools, created on first use. Raises its errors."""
        described = json.dumps(tools)
        if described not in self._tool_turns:
            template = {**self._template, "tools": tools} if tools else self._template
            self._tool_turns[described] = ToolTurns(self._tokenizer, self._parser, template)
        return self._tool_turns[described]

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        chat = self._chats.get(request.match_info["key"])
        if chat is None:
            return _error("this conversation has ended", status=404)
        try:
            body = await request.json()
            answer = await chat.answer(body)
        except (ChatError, json.JSONDecodeError) as error:
            return _error(str(error))
        if body.get("stream"):
            return await _streamed(request, answer, body)
        return web.json_response(answer)


class _Chat:
    """One conversation.

    Attributes:
        failure: Reason why it cannot continue, whatever the agent does; None if there is none.
    """

    def __init__(self, policy: Conversation, server: ChatServer):
        self.failure: QarlError | None = None
        self._policy = policy
        self._server = server
        self._last_request: Request = ([], [])
        self._turn: Completion | None = None
        self._calls: list[ToolCall] = []
        self._answer: dict[str, Any] = {}
        self._cut_off = False
        self._lock = asyncio.Lock()

    async def answer(self, body: Any) -> dict[str, Any]:
        """Return the chat completion for a request.

        Raises `ChatError`, and the errors of `Conversation.generate`.
        """
        request, limit = _read(body)
        async with self._lock:
            if self._cut_off:
                raise ChatError("no token is left for another turn")
            # A repeated request gets the same answer.
            if request != self._last_request:
                self._answer = await self._next(request, limit)
                self._last_request = request
            return self._answer

    async def _next(self, request: Request, limit: int | None) -> dict[str, Any]:
        try:
            tool_turns = self._server.tool_turns(request[1])
            self._turn = await self._policy.generate(self._new_tokens(tool_turns, *request), limit)
        # The agent gets an empty turn that was cut off, so that it ends, and is judged as it is.
        except OutOfRoomError:
            self._cut_off = True
            return self._response("", [], "length")
        except QarlError as error:
            self.failure = error
            raise ChatError(str(error)) from error
        text, calls = tool_turns.read(self._turn)
        readable = [call for call in calls if call.name]
        self._policy.events["broken_calls"] += len(calls) - len(readable)
        self._policy.events["tool_calls"] += len(calls)
        self._calls = readable
        reason = "tool_calls" if readable else "stop"
        return self._response(text, readable, "length" if self._turn.truncated else reason)

    def _new_tokens(
        self, tool_turns: ToolTurns, messages: list[dict[str, Any]], tools: list[Any]
    ) -> tuple[int, ...]:
        """Return the tokens between the previous turn and the next one."""
        if self._turn is None:
            self._policy.open(self._server.prompt(messages, tools))
            return ()
        before, tools_before = self._last_request
        answer, *new_messages = messages[len(before) :] or [{}]
        if (
            messages[: len(before)] != before
            or tools != tools_before
            or answer.get("role") != "assistant"
            or not new_messages
        ):
            self._policy.events["rewritten"] += 1
            raise ChatError(
                f"this request does not continue the {len(before)} messages before it, their"
                " answer and the same tools; a conversation is one line of tokens, of which"
                " nothing is written anew"
            )
        said = [self._as_said(message) for message in new_messages]
        return tool_turns.reply(self._turn, self._calls, said)

    def _as_said(self, message: dict[str, Any]) -> Said:
        if message["role"] == "user":
            return Said(message["content"])
        ids = [self._call_id(number) for number in range(len(self._calls))]
        if message["role"] != "tool" or message.get("tool_call_id") not in ids:
            raise ChatError(
                f"{message!r:.200} follows a turn; allowed are results of its calls {ids}, and a"
                " user's words"
            )
        return Said(message["content"], ids.index(message["tool_call_id"]))

    def _call_id(self, call: int) -> str:
        return f"call_{self._policy.turns}_{call}"

    def _response(
        self,
        text: str,
        calls: list[ToolCall],
        reason: str,
    ) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if calls:
            functions = [
                {"name": call.name, "arguments": json.dumps(call.arguments)} for call in calls
            ]
            message["tool_calls"] = [
                {"id": self._call_id(n), "type": "function", "function": function}
                for n, function in enumerate(functions)
            ]
        total = len(self._policy.prompt.token_ids) + len(self._policy.token_ids)
        new = 0 if self._cut_off or self._turn is None else len(self._turn.token_ids)
        return {
            "id": f"chat-{self._policy.turns}",
            "object": "chat.completion",
            "created": 0,
            "model": "policy",
            "choices": [{"index": 0, "message": message, "finish_reason": reason}],
            "usage": {
                "prompt_tokens": total - new,
                "completion_tokens": new,
                "total_tokens": total,
            },
        }


def _read(body: Any) -> tuple[Request, int | None]:
    """Return a request's messages and tools, and its upper bound on the turn's tokens."""
    try:
        for name, value in body.items():
            if name not in _TAKEN and value not in (None, _USUAL.get(name)):
                raise ChatError(
                    f"{name} {value!r:.80} is not accepted: the run says how turns are sampled;"
                    " omit it"
                )
        messages = [_message(message) for message in body["messages"]]
        if not messages:
            raise ChatError("messages is empty; begin with what the policy is asked")
        tools = list(body.get("tools") or ())
        limit = body.get("max_completion_tokens")
        if limit is None:
            limit = body.get("max_tokens")
        if limit is not None and int(limit) < 1:
            raise ChatError(f"max_tokens {limit!r} must be at least 1, or omitted")
        return (messages, tools), None if limit is None else int(limit)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ChatError(
            f"this is not a request for a chat completion: {describe_error(error)}"
        ) from error


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message as chat templates expect it."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        if any(part["type"] != "text" for part in content):
            raise ChatError(
                f"content of {sorted({part['type'] for part in content})} is not accepted; give"
                " text"
            )
        content = "".join(part["text"] for part in content)
    role = "system" if message["role"] == "developer" else message["role"]
    optional = ("name", "tool_call_id", "tool_calls")
    fields = {name: message[name] for name in optional if message.get(name)}
    return {"role": role, "content": content, **fields}


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
    """Send the complete turn as one event, and the reason of its end as another."""
    choice = answer["choices"][0]
    head = {**answer, "object": "chat.completion.chunk", "usage": None}
    delta = dict(choice["message"])
    if "tool_calls" in delta:
        delta["tool_calls"] = [{"index": n, **call} for n, call in enumerate(delta["tool_calls"])]
    turn = {"index": 0, "delta": delta, "finish_reason": None}
    end = {"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}
    events = [{**head, "choices": [turn]}, {**head, "choices": [end]}]
    if (body.get("stream_options") or {}).get("include_usage"):
        events += [{**head, "choices": [], "usage": answer["usage"]}]
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for data in [*map(json.dumps, events), "[DONE]"]:
        await response.write(f"data: {data}\n\n".encode())
    await response.write_eof()
    return response
