"""Conversations of several turns, kept as the tokens that were sampled.

A conversation follows a user's `async def rollout(policy, problem)`, the tools of an environment
class, or an agent that requests chat completions.

Text for the policy is appended to its tokens, and nothing is rendered anew. Turns of many
conversations are sampled together: as soon as every running conversation waits for a turn, or when
the others are slow. An engine's answer does not depend on the prompts that it samples together.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from qarl.configs.functions import describe_error
from qarl.rollout.engine import SamplingEngine
from qarl.rollout.types import Completion, Prompt, Sampling
from qarl.tasks.base import Problem, RewardError, as_reward

Ask = Callable[[Prompt], Awaitable[Completion]]
Rollout = Callable[["Conversation", Problem], Awaitable[Any]]

PATIENCE = 1.0
"""Seconds after which the pending turns are sampled although other conversations are still running.

The time starts anew whenever a conversation asks for a turn or ends.
"""


class OutOfRoomError(Exception):
    """`rollout.max_new_tokens` leaves no token for another turn.

    If a rollout does not catch it, the conversation ends here, cut off, and is judged by its last
    turn.
    """


class Conversation:
    """A rollout's access to the policy.

    Args:
        prompt: First input of the policy.
        tokenizer: The policy's tokenizer.
        limit: Upper bound on tokens after the prompt, of turns and of the text between them.
        ask: Samples a completion.
        server: A `qarl.conversations.chat.ChatServer`, for `served`.

    Attributes:
        events: Counts of what happened, for the metrics. A rollout may add its own.
        waiting: Whether a turn of the policy is pending.
    """

    def __init__(
        self,
        prompt: Prompt,
        tokenizer: Any,
        limit: int,
        ask: Ask,
        server: Any = None,
    ):
        self.tokenizer = tokenizer
        self.events = Counter[str]()
        self.prompt = prompt
        self.waiting = False
        self._limit = limit
        self._ask = ask
        self._server = server
        self._turns: list[Completion] = []
        self._said: list[tuple[int, ...]] = []  # the tokens before each turn
        self._out_of_room = False

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Tokens after the prompt: the turns, and the text between them."""
        parts = zip(self._said, self._turns, strict=True)
        return tuple(token for said, turn in parts for token in (*said, *turn.token_ids))

    @property
    def turns(self) -> int:
        """Number of turns that the policy has taken so far."""
        return len(self._turns)

    def served(self) -> AbstractAsyncContextManager[str]:
        """Serve this conversation to an agent as OpenAI's chat completions.

        Use it as `async with policy.served() as base_url`.
        """
        assert self._server is not None
        return self._server.serve(self)

    def open(self, token_ids: Sequence[int]) -> None:
        """Replace the problem's own prompt by these tokens.

        All samples of a problem have to begin alike. Raises `ValueError` after the first turn.
        """
        if self._turns:
            raise ValueError(
                f"opened after {len(self._turns)} turns; a prompt comes before the first"
            )
        self.prompt = replace(self.prompt, token_ids=tuple(token_ids))

    async def generate(
        self, said: str | Sequence[int] = (), max_new_tokens: int | None = None
    ) -> Completion:
        """Return the policy's next turn, after `said`.

        Args:
            said: Text for the policy, in which special tokens are not recognized, or token ids.
                Empty before the first turn, because the prompt comes there.
            max_new_tokens: Upper bound on this turn, within what is left of the conversation's
                limit.

        Raises:
            OutOfRoomError: `said` leaves no room for a turn.
            ValueError: `said` is given before the first turn, is empty after a turn, or has ids
                that the tokenizer lacks; or the turn before is still pending.
        """
        tokens = self.encode(said) if isinstance(said, str) else tuple(said)
        # Nothing is said before the first turn, and something before every other one.
        fits_turn = bool(tokens) == bool(self._turns)
        if not fits_turn or not all(0 <= token < len(self.tokenizer) for token in tokens):
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
        limit = left
        if max_new_tokens is not None:
            limit = max(1, min(left, max_new_tokens))
        prompt = replace(
            self.prompt,
            token_ids=(*self.prompt.token_ids, *self.token_ids, *tokens),
            draws=(number, sample, len(self._turns)),
            max_new_tokens=limit,
        )
        if self.waiting:
            raise ValueError(
                "asked for a turn while the one before is sampled; await policy.generate() first"
            )
        self.waiting = True
        try:
            turn = await self._ask(prompt)
        finally:
            self.waiting = False
        self._said.append(tokens)
        self._turns.append(turn)
        self.events["empty_turns"] += not turn.text.strip()
        self.events["cut_off_turns"] += turn.truncated
        return turn

    def encode(self, text: str) -> tuple[int, ...]:
        """Return a text's tokens. Special tokens that are written in it are read as text."""
        encoded = self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)
        return tuple(encoded["input_ids"])

    def completion(self, reward: float | None) -> Completion:
        """Return the conversation as one completion.

        reward: the conversation's reward. If None, the task's reward judges the last turn. Raises
        `ValueError` if the policy was never asked.
        """
        if not self._turns:
            raise ValueError("never asked the policy for a turn; await policy.generate()")
        spans = []
        logprobs = []
        versions = []
        for said, turn in zip(self._said, self._turns, strict=True):
            if said:
                spans.append((len(logprobs), len(logprobs) + len(said)))
            versions += turn.versions[:1] * len(said) + turn.versions
            logprobs += [0.0] * len(said) + list(turn.logprobs)
        last = self._turns[-1]
        switches = [
            (token, later)
            for token, (earlier, later) in enumerate(pairwise(versions), 1)
            if later != earlier
        ]
        counts = {
            "turns": len(self._turns),
            "environment_tokens": sum(end - start for start, end in spans),
        }
        # A rollout's counts may be NumPy's.
        events = {name: float(count) for name, count in (counts | self.events).items()}
        return replace(
            last,
            token_ids=self.token_ids,
            logprobs=tuple(logprobs),
            weight_version=versions[0],
            switches=tuple(switches),
            finish_reason="length" if self._out_of_room else last.finish_reason,
            environment=tuple(spans),
            reward=reward,
            events=tuple(sorted(events.items())),
        )


@dataclass(frozen=True)
class Speaker:
    """Settings of conversations."""

    rollout: Rollout
    """Function that converses with the policy."""
    tokenizer: Any
    """The conversations' own tokenizer."""
    time_limit: float | None
    """Seconds in which a conversation has to make progress; None if it has its own limit."""
    server: Any = None
    """A `qarl.conversations.chat.ChatServer` if agents converse, otherwise None."""


async def converse(
    engine: SamplingEngine,
    speaker: Speaker,
    problems: Sequence[Problem],
    prompts: Sequence[Prompt],
    sampling: Sampling,
) -> tuple[list[Prompt], list[list[Completion]]]:
    """Hold `sampling.samples` conversations about each problem.

    Returns the prompts, which a rollout may have replaced, and for each prompt its conversations as
    completions.

    sampling: `max_new_tokens` limits a conversation after its prompt.

    Raises:
        RewardError: The rollout failed, or opened one problem in two ways. Errors of the engine are
            passed on.
    """
    turns = _Turns()
    server = speaker.server
    limit = sampling.max_new_tokens
    conversations: list[tuple[Problem, Conversation]] = []
    pairs = zip(problems, prompts, strict=True)
    for j, (problem, prompt) in enumerate(pairs, sampling.first_prompt):
        for k in range(sampling.samples):
            first = replace(prompt, draws=(j, k, 0))
            policy = Conversation(first, speaker.tokenizer, limit, turns.ask, server)
            conversations.append((problem, policy))
    policies = [policy for _, policy in conversations]
    tasks = [
        asyncio.create_task(_conversation(speaker.rollout, policy, problem, turns.moved))
        for problem, policy in conversations
    ]
    try:
        while running := [task for task in tasks if not task.done()]:
            if len(turns.waiting) < len(running) and await turns.move(speaker.time_limit):
                continue
            for task in tasks:
                if task.done():
                    task.result()  # raises the error of a conversation that failed
            turns.answer(engine, replace(sampling, samples=1))
            # Let the conversations run that got a turn.
            await asyncio.sleep(0)
        completions = [task.result() for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if server is not None:
            await server.close()
    samples = sampling.samples
    starts = range(0, len(completions), samples)
    opened = [
        _opened(prompt, policies[start : start + samples])
        for start, prompt in zip(starts, prompts, strict=True)
    ]
    return opened, [completions[start : start + samples] for start in starts]


def _opened(prompt: Prompt, policies: Sequence[Conversation]) -> Prompt:
    """Return the prompt with which a group's conversations began, the same for all of them."""
    first = policies[0].prompt.token_ids
    for policy in policies:
        if policy.prompt.token_ids != first:
            one = policy.tokenizer.decode(first)[-80:]
            other = policy.tokenizer.decode(policy.prompt.token_ids)[-80:]
            raise RewardError(
                f"the rollout opened problem {prompt.id!r} in two ways, …{one!r} and"
                f" …{other!r}, but all samples of a problem begin alike; seed what it draws by"
                " the problem"
            )
    return replace(prompt, token_ids=first)


class _Turns:
    """Turns that conversations wait for."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Prompt, asyncio.Future[Completion]]] = []
        """Prompts of pending turns, and the futures of their completions."""
        self.moved = asyncio.Event()
        """Set when a conversation asks for a turn, or ends."""

    def ask(self, prompt: Prompt) -> Awaitable[Completion]:
        turn = asyncio.get_running_loop().create_future()
        self.waiting.append((prompt, turn))
        self.moved.set()
        return turn

    async def move(self, time_limit: float | None) -> bool:
        """Wait until a conversation asks for a turn or ends.

        Returns False if none does within `PATIENCE` while turns are pending.
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

    def answer(self, engine: SamplingEngine, sampling: Sampling) -> None:
        answers = engine.generate([prompt for prompt, _ in self.waiting], sampling)
        for (_, turn), (answer,) in zip(self.waiting, answers, strict=True):
            if not turn.done():  # cancelled if its agent has gone
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
            f"the rollout of problem {problem.id!r} raised {describe_error(error)}\n  question:"
            f" {problem.question!r}"
        ) from error
    finally:
        moved.set()
