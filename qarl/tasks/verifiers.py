"""Tasks of the package verifiers: a named environment with its problems, tools and rewards."""

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
    """An environment of verifiers in a process of its own.

    Args:
        name: Name of the task.
        options: verifiers' `[env]` section.
        time_limit: Seconds in which a conversation has to make progress.

    Raises:
        TaskError: The environment cannot be used.
    """

    def __init__(self, name: str, options: dict[str, Any], time_limit: float):
        self.name = name
        self._time_limit = time_limit
        path = (*sys.path, os.getcwd())  # a person's own taskset may be in the working folder
        job = Job(
            word="task",
            spec=name.removeprefix(VERIFIERS),
            task=name,
            time_limit=time_limit,
            path=path,
            options=options,
        )
        self._host = Child(job, "qarl.tasks.verifiers_host")
        self._lock = threading.Lock()
        self._tasks: list[Begins] = self._host.start()
        atexit.register(self._host.end)

    def table(self) -> Table:
        """Return the environment's tasks, of which one in eight is held out, by its content.

        Raises `TaskError` if it has no tasks.
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
            raise TaskError(
                f"{self.name} has no task with these options; give options that select some"
            )
        return Table(self.name, by_split, Counts(rows=len(self._tasks)))

    async def rollout(self, policy: Any, problem: Problem) -> float | None:
        """Let the environment converse with the policy, and return its reward.

        Returns None if the environment failed, which the metrics count. Raises `RewardError` if the
        environment asks the policy for nothing in three tries.
        """
        outcome = Outcome(None)
        for _ in range(3):
            async with policy.served() as url:
                outcome = await self._outcome(policy, problem.metadata["number"], url)
            policy.events["environment_errors"] += outcome.reward is None
            if policy.turns:
                return outcome.reward
        raise RewardError(
            f"{self.name} never asked the policy for a turn at {problem.id!r}: {outcome.words}"
        )

    async def _outcome(self, policy: Any, number: int, url: str) -> Outcome:
        pipe, child_end = Pipe()
        try:
            with child_end, self._lock:
                self._host.start()
                send_handle(self._host.pipe, child_end.fileno(), None)
            pipe.send((number, url))
            while True:
                turns = policy.turns
                try:
                    await readable(pipe, self._time_limit)
                    return pipe.recv()
                except TimeoutError:
                    # The policy itself may have used the time, or may be at it.
                    if policy.turns == turns and not policy.waiting:
                        return Outcome(None, too_long(self._time_limit))
        except (EOFError, OSError):
            return Outcome(None, f"its process ended ({self._host.ending()})")
        finally:
            pipe.close()


@functools.cache
def open_verifiers(name: str, options: str, time_limit: float) -> VerifiersHost:
    """Return this process's host of an environment, started on first use.

    options: verifiers' `[env]` section as JSON. Raises `TaskError` if it cannot be used.
    """
    return VerifiersHost(name, json.loads(options), time_limit)
