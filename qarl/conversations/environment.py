"""A rollout in which the policy calls an environment class's tools, until a turn calls none."""

from contextlib import suppress
from typing import Any

from qarl.conversations import Conversation, OutOfRoomError, Rollout
from qarl.conversations.tools import Said, ToolCall, ToolTurns
from qarl.tasks.base import Failure, Problem, RewardError, as_reward
from qarl.tasks.environment_host import REWARD
from qarl.tasks.environments import Environment, Environments


def environment_rollout(environments: Environments, turns: ToolTurns) -> Rollout:
    """Return the rollout of an environment class.

    Its reward is that of `get_reward`, or None if there is no such method or the instance is gone.
    The rollout raises `RewardError` if `reset` or `get_reward` fails. If a tool fails, the policy
    is told.
    """
    tools = {tool["function"]["name"] for tool in environments.description.tools}

    async def rollout(policy: Conversation, problem: Problem) -> float | None:
        environment = environments.open()
        try:
            said = await environment.reset(problem)
            if policy.prompt.text != problem.question + said:
                raise RewardError(
                    f"environment: reset says {said!r:.80} of problem {problem.id!r} here and"
                    " something else there, but all samples of a problem begin alike; draw by"
                    " `random`, which is seeded by the problem"
                )
            with suppress(OutOfRoomError):  # the conversation is cut off, and judged as it is
                turn = await policy.generate()
                while calls := turns.read(turn)[1]:
                    results = [await result(policy, environment, problem, call) for call in calls]
                    said = [Said(text, number) for number, text in enumerate(results)]
                    turn = await policy.generate(turns.reply(turn, calls, said))
            return await _reward(environment, problem) if environments.judges else None
        finally:
            environment.close()

    async def result(
        policy: Conversation, environment: Environment, problem: Problem, call: ToolCall
    ) -> str:
        policy.events["tool_calls"] += 1
        seed = f"{problem.id} {policy.prompt.draws} {policy.events['tool_calls']}"
        if not call.name:
            policy.events["broken_calls"] += 1
            return "error: the call cannot be read"
        if call.name not in tools:
            outcome: Any = Failure(
                f"there is no tool {call.name!r}; there are {', '.join(sorted(tools))}"
            )
        else:
            outcome = await environment.call(call.name, call.arguments, seed)
        if isinstance(outcome, Failure):
            policy.events["tool_errors"] += 1
            return f"error: {outcome.words}"
        return "" if outcome is None else outcome

    return rollout


async def _reward(environment: Environment, problem: Problem) -> float | None:
    if environment.lost is not None:
        return None
    try:
        return as_reward(await environment.call(REWARD, {}, problem.id))
    except ValueError as error:
        raise RewardError(f"environment: {REWARD} of problem {problem.id!r} {error}") from None
