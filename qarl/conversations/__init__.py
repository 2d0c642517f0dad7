"""Conversations of several turns, in the tokens that were sampled: a user's `async def
rollout(policy, problem)`, the tools of an environment class, or an agent that asks for chat
completions.

What is said to the policy is appended to its tokens, and nothing is rendered anew. Turns of many
conversations are sampled together, once each that goes on waits for one, or the others are slow; an
engine's answer does not depend on those beside it.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from qarl.configs.functions import in_words
from qarl.rollout.engine import Engine
from qarl.rollout.types import Completion, Prompt, Sampling
from qarl.tasks.base import Problem, RewardError, as_reward

Ask = Callable[[Prompt], Awaitable[Completion]]
Rollout = Callable[["Conversation", Problem], Awaitable[Any]]

PATIENCE = 1.0
"""Seconds without a move after which the turns that are waited for are sampled without the
others.
"""


class OutOfRoomError(Exception):
    """No token of `rollout.max_new_tokens` is left for another turn. Where a rollout does not catch
    it, the conversation ends here, cut off, and is judged by its last turn.
    """


class Conversation:
    """What a rollout is given to speak with the policy.

    tokenizer: the policy's. events: what happened, with its count, for the metrics; a rollout may
    add its own. prompt: what the policy is given first. limit: tokens after it, of turns and of
    what is said. ask: samples a completion. server: a `qarl.conversations.chat.ChatServer`, for
    `served`. waiting: whether the policy has to answer.
    """

    def __init__(self, prompt: Prompt, tokenizer: Any, limit: int, ask: Ask, server: Any = None):
        self.tokenizer, self.events = tokenizer, Counter[str]()
        self.prompt, self._limit, self._ask, self._server = prompt, limit, ask, server
        self._turns: list[Completion] = []
        self._said: list[tuple[int, ...]] = []
        self._out_of_room = self.waiting = False

    @property
    def token_ids(self) -> tuple[int, ...]:
        """After the prompt: turns, and what was said between them."""
        parts = zip(self._said, self._turns, strict=True)
        return tuple(token for said, turn in parts for token in (*said, *turn.token_ids))

    @property
    def turns(self) -> int:
        """Of the policy until now."""
        return len(self._turns)

    def served(self) -> AbstractAsyncContextManager[str]:
        """`async with policy.served() as base_url`: this conversation as OpenAI's chat completions,
        for an agent.
        """
        assert self._server is not None
        return self._server.serve(self)

    def open(self, token_ids: Sequence[int]) -> None:
        """Give the policy these tokens first, instead of the problem's own prompt. All samples of a
        problem have to begin alike. Raises `ValueError` after the first turn.
        """
        if self._turns:
            raise ValueError(
                f"opened after {len(self._turns)} turns; a prompt comes before the first"
            )
        self.prompt = replace(self.prompt, token_ids=tuple(token_ids))

    async def generate(
        self, said: str | Sequence[int] = (), max_new_tokens: int | None = None
    ) -> Completion:
        """The policy's next turn, after `said` to it: a text, in which no special token is read, or
        token ids.

        max_new_tokens: of this turn at most, within what is left. Raises `OutOfRoomError` where
        `said` leaves no room for a turn, and `ValueError` for something said before the first turn,
        whose place is the prompt, for nothing after a turn, and for ids that the tokenizer does not
        have.
        """
        tokens = self.encode(said) if isinstance(said, str) else tuple(said)
        if bool(tokens) != bool(self._turns) or not all(
            0 <= token < len(self.tokenizer) for token in tokens
        ):
            raise ValueError(
                f"{said!r:.80} is said after {len(self._turns)} turns: before the first say"
                f" nothing, afterwards a text or some of the tokenizer's {len(self.tokenizer)} ids"
            )
        left = self._limit - len(self.token_ids) - len(tokens)
        if left < 1:
            self._out_of_room = True
            raise OutOfRoomError(
                f"{len(tokens)} tokens leave a turn no room in rollout.max_new_tokens {self._limit}"
            )
        number, sample, _ = self.prompt.draws or (0, 0, 0)
        before = (*self.prompt.token_ids, *self.token_ids, *tokens)
        limit = left if max_new_tokens is None else max(1, min(left, max_new_tokens))
        draws = (number, sample, len(self._turns))
        if self.waiting:
            raise ValueError(
                "asked for a turn while the one before is sampled; await policy.generate() first"
            )
        self.waiting = True
        try:
            turn = await self._ask(
                replace(self.prompt, token_ids=before, draws=draws, max_new_tokens=limit)
            )
        finally:
            self.waiting = False
        self._said.append(tokens)
        self._turns.append(turn)
        self.events["empty_turns"] += not turn.text.strip()
        self.events["cut_off_turns"] += turn.truncated
        return turn

    def encode(self, text: str) -> tuple[int, ...]:
        """A text's tokens; special tokens that are written in it are text."""
        return tuple(
            self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        )

    def completion(self, reward: float | None) -> Completion:
        """The conversation as one completion. reward: what it is worth; None: the task's reward
        judges the last turn. Raises `ValueError` where the policy was never asked.
        """
        if not self._turns:
            raise ValueError("asked the policy for no turn; await policy.generate()")
        spans, logprobs, versions = [], [], []
        for said, turn in zip(self._said, self._turns, strict=True):
            spans += [(len(logprobs), len(logprobs) + len(said))] if said else []
            versions += turn.versions[:1] * len(said) + turn.versions
            logprobs += [0.0] * len(said) + list(turn.logprobs)
        last, steps = self._turns[-1], enumerate(pairwise(versions), 1)
        counts = {
            "turns": len(self._turns),
            "environment_tokens": sum(end - start for start, end in spans),
        }
        # of NumPy's too
        happened = {name: float(count) for name, count in (counts | self.events).items()}
        return replace(
            last,
            token_ids=self.token_ids,
            logprobs=tuple(logprobs),
            weight_version=versions[0],
            switches=tuple((place, later) for place, (earlier, later) in steps if later != earlier),
            finish_reason="length" if self._out_of_room else last.finish_reason,
            environment=tuple(spans),
            reward=reward,
            events=tuple(sorted(happened.items())),
        )


@dataclass(frozen=True)
class Speaker:
    """How conversations go. tokenizer: of its own. time_limit: seconds in which one of them must
    move; None: they bound themselves. server: a `qarl.conversations.chat.ChatServer`, where agents
    speak.
    """

    rollout: Rollout
    tokenizer: Any
    time_limit: float | None
    server: Any = None


async def converse(
    engine: Engine,
    speaker: Speaker,
    problems: Sequence[Problem],
    prompts: Sequence[Prompt],
    sampling: Sampling,
) -> tuple[list[Prompt], list[list[Completion]]]:
    """`sampling.samples` conversations of each problem, each as a completion of its prompt, and the
    prompts, which a rollout may have opened otherwise.

    sampling: `max_new_tokens` bounds a conversation after its prompt. Raises `RewardError` where
    the rollout fails, or opens one problem in two ways, and what the engine raises.
    """
    turns, server, limit = _Turns(), speaker.server, sampling.max_new_tokens
    pairs = enumerate(zip(problems, prompts, strict=True), sampling.first_prompt)
    begun = [
        (p, replace(prompt, draws=(j, k, 0)))
        for j, (p, prompt) in pairs
        for k in range(sampling.samples)
    ]
    policies = [
        Conversation(prompt, speaker.tokenizer, limit, turns.ask, server) for _, prompt in begun
    ]
    tasks = [
        asyncio.create_task(_conversation(speaker.rollout, policy, problem, turns.moved))
        for policy, (problem, _) in zip(policies, begun, strict=True)
    ]
    try:
        while going_on := [task for task in tasks if not task.done()]:
            if len(turns.waiting) < len(going_on) and await turns.move(speaker.time_limit):
                continue
            for task in tasks:
                if task.done():
                    task.result()  # which raises where it failed
            turns.answer(engine, replace(sampling, samples=1))
            await asyncio.sleep(0)
        done = [task.result() for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if server is not None:
            await server.close()
    starts = range(0, len(done), sampling.samples)
    opened = [
        _opened(prompt, policies[n : n + sampling.samples])
        for n, prompt in zip(starts, prompts, strict=True)
    ]
    return opened, [done[start : start + sampling.samples] for start in starts]


def _opened(prompt: Prompt, policies: Sequence[Conversation]) -> Prompt:
    """What a group's conversations began with."""
    first = policies[0].prompt.token_ids
    for policy in policies:
        if policy.prompt.token_ids != first:
            words = [
                policy.tokenizer.decode(tokens)[-80:] for tokens in (first, policy.prompt.token_ids)
            ]
            raise RewardError(
                f"the rollout opened problem {prompt.id!r} in two ways, …{words[0]!r} and"
                f" …{words[1]!r}, but all samples of a problem begin alike; seed what it draws by"
                " the problem"
            )
    return replace(prompt, token_ids=first)


class _Turns:
    """Turns that conversations wait for. moved: set where one asked for a turn, or ended."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Prompt, asyncio.Future[Completion]]] = []
        self.moved = asyncio.Event()

    def ask(self, prompt: Prompt) -> Awaitable[Completion]:
        self.waiting.append((prompt, asyncio.get_running_loop().create_future()))
        self.moved.set()
        return self.waiting[-1][1]

    async def move(self, time_limit: float | None) -> bool:
        """Wait until a conversation moves; False where some wait for a turn and the others take
        their time.
        """
        self.moved.clear()
        try:
            await asyncio.wait_for(self.moved.wait(), PATIENCE if self.waiting else time_limit)
        except TimeoutError:
            if not self.waiting:
                raise RewardError(
                    f"a rollout took longer than task.time_limit {time_limit:g} s; raise it"
                ) from None
            return False
        return True

    def answer(self, engine: Engine, sampling: Sampling) -> None:
        answers = engine.generate([prompt for prompt, _ in self.waiting], sampling)
        for (_, turn), (answer,) in zip(self.waiting, answers, strict=True):
            if not turn.done():  # its agent has gone
                turn.set_result(answer)
        self.waiting.clear()


async def _conversation(
    rollout: Rollout, policy: Conversation, problem: Problem, moved: asyncio.Event
) -> Completion:
    outcome = None
    try:
        with suppress(OutOfRoomError):  # cut off, and judged as it is
            outcome = await rollout(policy, problem)
        return policy.completion(as_reward(outcome))
    except RewardError:
        raise
    except (Exception, SystemExit) as error:
        raise RewardError(
            f"the rollout of problem {problem.id!r} raised {in_words(error)}\n  question:"
            f" {problem.question!r}"
        ) from error
    finally:
        moved.set()
