"""Tasks of the package verifiers: an environment by its name, with its problems, tools and
rewards.
"""

import atexit
import functools
import json
import os
import sys
import threading
from multiprocessing import Pipe
from multiprocessing.reduction import send_handle
from typing import Any

from qarl.configs.schema.task import VERIFIERS
from qarl.tasks.base import Problem, RewardError, Split, TaskError, is_heldout
from qarl.tasks.environments import readable
from qarl.tasks.signatures import too_long
from qarl.tasks.table import Counts, Table
from qarl.tasks.verifiers_host import Begins, Outcome
from qarl.tasks.worker import Job
from qarl.tasks.workers import Child


class VerifiersHost:
    """An environment in a process of its own. options: verifiers' `[env]` section. time_limit:
    seconds in which a conversation must move. Raises `TaskError` where it cannot be used.
    """

    def __init__(self, name: str, options: dict[str, Any], time_limit: float):
        self.name, self._time_limit = name, time_limit
        path = (*sys.path, os.getcwd())  # where a taskset of one's own may be
        job = Job(
            word="task",
            spec=name.removeprefix(VERIFIERS),
            task=name,
            time_limit=time_limit,
            path=path,
            options=options,
        )
        self._host = Child(job, "qarl.tasks.verifiers_host")
        self._asking = threading.Lock()
        self._tasks: list[Begins] = self._host.start()
        atexit.register(self._host.end)

    def table(self) -> Table:
        """Its tasks, of which one in eight is held out, by its content. Raises `TaskError` where it
        has none.
        """
        by_split: dict[Split, list[Problem]] = {"train": [], "heldout": []}
        for number, (key, messages) in enumerate(self._tasks):
            question = messages[-1]["content"] if messages else f"task {number}"
            chat = messages if len(messages) > 1 else ()
            problem = Problem(
                id=f"{self.name}:{number}",
                question=question,
                answer="",
                metadata={"number": number},
                messages=chat,
            )
            by_split["heldout" if is_heldout(key) else "train"].append(problem)
        if not self._tasks:
            raise TaskError(f"{self.name} has no task; give other options")
        return Table(self.name, by_split, Counts(rows=len(self._tasks)))

    async def rollout(self, policy: Any, problem: Problem) -> float | None:
        """Let the environment speak with the policy; its reward, None where it failed, which the
        metrics count. Raises `RewardError` where it does not speak at all, in three tries.
        """
        outcome = Outcome(None)
        for _ in range(3):
            async with policy.served() as url:
                outcome = await self._outcome(policy, problem.metadata["number"], url)
            policy.events["environment_errors"] += outcome.reward is None
            if policy.turns:
                return outcome.reward
        raise RewardError(
            f"{self.name} asked the policy for nothing at {problem.id!r}: {outcome.words}"
        )

    async def _outcome(self, policy: Any, number: int, url: str) -> Outcome:
        pipe, theirs = Pipe()
        try:
            with theirs, self._asking:
                self._host.start()
                send_handle(self._host.pipe, theirs.fileno(), None)
            pipe.send((number, url))
            while True:
                before = policy.turns
                try:
                    await readable(pipe, self._time_limit)
                    return pipe.recv()
                except TimeoutError:  # of which the policy may have taken a part
                    if policy.turns == before and not policy.waiting:
                        return Outcome(None, too_long(self._time_limit))
        except (EOFError, OSError):
            return Outcome(None, f"its process ended ({self._host.ending()})")
        finally:
            pipe.close()


@functools.cache
def open_verifiers(name: str, options: str, time_limit: float) -> VerifiersHost:
    """A process has one host of an environment. options: as JSON. Raises `TaskError` where it
    cannot be used.
    """
    return VerifiersHost(name, json.loads(options), time_limit)
