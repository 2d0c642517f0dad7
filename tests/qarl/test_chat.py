"""An agent's chat completions: its requests go on from the tokens that were sampled, or are
refused.
"""

import asyncio
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError

from qarl.conversations import Conversation, Speaker, converse
from qarl.conversations.chat import ChatServer
from qarl.conversations.tools import Said, ToolTurns
from qarl.rollout.types import Completion, Prompt, Sampling
from qarl.tasks import Problem, RewardError
from tests.support.conversations import Script

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {"name": "add", "description": "Adds.", "parameters": {}},
    }
]
CALLS = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
ASKED = {"role": "user", "content": [{"type": "text", "text": "q?"}]}
CHAT: list[Any] = [{"role": "developer", "content": "Be."}, ASKED]


def spoken(
    tokenizer: Any,
    agent: Any,
    says: list[str],
    limit: int = 2000,
    most: int = 2000,
    samples: int = 1,
) -> Any:
    """Return the conversations' prompt, the first conversation, and the requests to the engine."""

    async def rollout(policy: Conversation, problem: Problem) -> Any:
        async with (
            policy.served() as url,
            AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client,
        ):
            return await agent(
                lambda **how: client.chat.completions.create(model="any", **how), policy
            )

    engine: Any = Script(tokenizer, says)
    speaker = Speaker(rollout, tokenizer, 10.0, ChatServer(tokenizer, "hermes", {}, most))
    problem = Problem("p", "q?", "")
    prompt = Prompt("p", "q?", (5, 6))
    talk = converse(engine, speaker, [problem], [prompt], Sampling(samples, limit))
    (opened,), ((first, *_),) = asyncio.run(talk)
    return opened, first, engine.asked


@pytest.mark.parametrize("streamed", [False, True])
def test_an_agents_conversation_is_one_line_of_tokens(tokenizer: Any, streamed: bool):
    """Two calls, their results in another order, and a user's words: each request's tokens begin
    with all that were sampled before, and the whole reads as the template writes it.
    """
    answers = []
    messages = list(CHAT)
    stream: dict[str, Any] = (
        {"stream": True, "stream_options": {"include_usage": True}} if streamed else {}
    )

    async def agent(create: Any, policy: Conversation) -> float:
        for _ in range(3):
            answer = await create(messages=messages, tools=TOOLS, max_tokens=50, **stream)
            if streamed:
                first, last, _ = [chunk.choices async for chunk in answer]
                choice = last[0]
                message = first[0].delta.model_dump(exclude_none=True)
            else:
                (choice,) = answer.choices
                message = choice.message.model_dump(exclude_none=True)
            answers.append(choice.finish_reason)
            messages.append(message)
            for call in reversed(message.get("tool_calls", [])):
                result = f"result of {call['id']}<|im_end|>"
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
            if not message.get("tool_calls"):
                messages.append({"role": "user", "content": "go on"})
        return 0.5

    opened, whole, asked = spoken(tokenizer, agent, ["so " + CALLS + CALLS, "hm", "<tool_call>{"])
    assert answers == ["tool_calls", "stop", "stop"]
    assert whole.reward == 0.5
    counts = dict(whole.events)
    assert counts["turns"] == 3
    assert counts["tool_calls"] == 3
    assert counts["broken_calls"] == 1
    line = (*opened.token_ids, *whole.token_ids)
    for request in asked:
        assert line[: len(request.token_ids)] == request.token_ids
        assert request.max_new_tokens == 50
    begun = [{"role": "system", "content": "Be."}, {"role": "user", "content": "q?"}]
    text = tokenizer.apply_chat_template(
        begun, tools=TOOLS, tokenize=False, add_generation_prompt=True
    )
    assert tokenizer.decode(opened.token_ids) == text
    assert (
        tokenizer.decode(whole.token_ids)
        == f"so {CALLS}{CALLS}<|im_end|>\n<|im_start|>tool\nresult of"
        " call_1_1<|im_end|><|im_end|>\n<|im_start|>tool\nresult of"
        " call_1_0<|im_end|><|im_end|>\n<|im_start|>assistant\nhm<|im_end|>\n<|im_start|>user\ngo"
        " on<|im_end|>\n<|im_start|>assistant\n<tool_call>{<|im_end|>"
    )
    special = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert sum(token == special for token in whole.token_ids) == 6, (
        "a special token was read in a result"
    )


def test_requests_an_agent_cannot_make_are_refused(tokenizer: Any):
    """Contract: a request that is repeated is answered as before and not sampled again."""
    said = {"role": "assistant", "content": "one"}
    faults: dict[str, dict[str, Any]] = {
        "temperature 0.7 is not accepted": {"messages": CHAT, "temperature": 0.7},
        "n 2 is not accepted": {"messages": CHAT, "n": 2},
        "image_url": {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "image_url", "image_url": {"url": "x"}}],
                }
            ]
        },
        "messages is empty": {"messages": []},
        "max_tokens 0 must be at least 1": {"messages": CHAT, "max_tokens": 0},
        "not a request": {"messages": [{"content": "q?"}]},
        "does not continue": {
            "messages": [CHAT[0], {"role": "user", "content": "other"}, said, ASKED]
        },
        "continue the 2 messages": {"messages": [*CHAT, said]},
        "same tools": {"messages": [*CHAT, said, ASKED], "tools": TOOLS},
        "follows a turn": {
            "messages": [
                *CHAT,
                said,
                {"role": "tool", "tool_call_id": "call_1_0", "content": "1"},
            ]
        },
    }

    async def agent(create: Any, policy: Conversation) -> float:
        first = await create(messages=CHAT)
        for again in await asyncio.gather(create(messages=CHAT), create(messages=CHAT)):
            assert again.choices == first.choices
        for words, request in faults.items():
            with pytest.raises(BadRequestError, match=words):
                await create(**request)
        assert policy.events["rewritten"] == 3
        return 1.0

    _, whole, asked = spoken(tokenizer, agent, ["one"])
    assert len(asked) == 1
    assert whole.reward == 1.0


def test_without_room_an_agent_is_answered_by_nothing(tokenizer: Any):
    async def agent(create: Any, policy: Conversation) -> None:
        messages = [
            *CHAT,
            (await create(messages=CHAT)).choices[0].message,
            {"role": "user", "content": "more " * 9},
        ]
        cut = (await create(messages=messages)).choices[0]
        assert (cut.finish_reason, cut.message.content) == ("length", "")
        with pytest.raises(BadRequestError, match="no token is left"):
            await create(messages=[*messages, cut.message, ASKED])

    _, whole, _ = spoken(tokenizer, agent, ["one"], limit=20)
    assert whole.truncated
    assert whole.reward is None
    assert dict(whole.events)["turns"] == 1


def test_what_no_conversation_can_have_ends_the_run(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
):
    """Whatever the agent makes of it: samples that begin otherwise, a prompt too long, a template
    that cannot go on.
    """
    begun = iter("ab")

    async def otherwise(create: Any, policy: Conversation) -> None:
        await create(messages=[{"role": "user", "content": next(begun)}])

    async def careless(create: Any, policy: Conversation) -> None:
        for messages in (CHAT, [*CHAT, {"role": "assistant", "content": "one"}, ASKED]):
            await create(messages=messages)

    with pytest.raises(
        RewardError,
        match=r"opened problem 'p' in two ways, .*a<\|im_end\|>.*begin alike",
    ):
        spoken(tokenizer, otherwise, ["one"], samples=2)
    with pytest.raises(RewardError, match=r"has \d+ tokens, above rollout.max_prompt_tokens 5"):
        spoken(tokenizer, careless, ["one"], most=5)
    monkeypatch.setattr(
        tokenizer, "chat_template", "{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    with pytest.raises(RewardError, match="no special token ends a turn"):
        spoken(tokenizer, careless, ["one"])


def test_a_template_that_drops_thoughts_goes_on_behind_them(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
):
    """Qwen3's way: the last turn has a place for thoughts, the ones before a user's words have
    none.
    """
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last"
        " %}<think>"
    )
    template += "</think>{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    template += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    monkeypatch.setattr(tokenizer, "chat_template", template)
    turn = Completion((5, tokenizer.eos_token_id), (0.0, 0.0), "", 0, "stop")
    reply = tokenizer.decode(ToolTurns(tokenizer, "", {}).reply(turn, [], [Said("more")]))
    assert reply == "\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
