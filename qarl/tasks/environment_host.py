"""The child processes of an environment class: a host that has imported it, and a fork of the host
a conversation.

    python -c "from qarl.tasks.environment_host import serve; serve(FD)"          (see
    `qarl.tasks.environments`)

Over the host's pipe comes one `Job`, answered by a `Description`, or in words by why the class
cannot be used; then file descriptors, each the pipe of a conversation, answered by the process that
is at its other end. There comes one `Call` after another, answered by what the method returned, or
by a `Failure`.
"""

import asyncio
import inspect
import json
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Any

from qarl.configs.functions import FunctionKind, load_function
from qarl.tasks.base import Failure, TaskError
from qarl.tasks.rewards import attempt
from qarl.tasks.signatures import too_long
from qarl.tasks.worker import begin, end_with, sendable

RESET, REWARD = "reset", "get_reward"
LONGEST = 100_000
"""Characters of a tool's result; the rest is cut off."""
_TAKES = "with public methods as its tools (docs/guide/conversations.md)"


@dataclass(frozen=True)
class Description:
    """tools: JSON schemas, as chat templates take them. methods: all public ones, `reset` and
    `get_reward` too.
    """

    tools: tuple[dict[str, Any], ...]
    methods: frozenset[str]


@dataclass(frozen=True)
class Call:
    """name: of a method. arguments: its keyword arguments, of which `reset` gets those it takes.
    seed: of `random`, and of numpy where it is imported, so that a run draws the same again.
    """

    name: str
    arguments: dict[str, Any]
    seed: str


def serve(fd: int) -> None:
    """The host's whole life: until the parent closes the pipe, or is gone."""
    life = os.dup(0)
    connection, job = begin(fd)
    try:
        environment: Any = load_function(
            FunctionKind(job.word, _TAKES, TaskError, "class"), job.spec
        )
    except TaskError as error:
        return connection.send(str(error))
    # which imports transformers: the host stays small, and its forks quick
    if not (pid := os.fork()):
        try:
            connection.send(describe(job.spec, environment))
        # `TaskError`, and whatever is wrong with transformers
        except Exception as error:
            connection.send(str(error))
        os._exit(0)
    os.waitpid(pid, 0)
    # forks that ended leave nothing to collect
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with suppress(EOFError, OSError):  # the parent closed the pipe, or is gone
        while True:
            pipe = recv_handle(connection)
            if not (pid := os.fork()):
                connection.close()
                _converse(Connection(pipe), life, environment, job.time_limit)
            os.close(pipe)
            connection.send(pid)


def describe(spec: str, environment: Any) -> Description:
    """Raises `TaskError` for what is no class, has no tool, or a tool without docstring or
    types.
    """
    from transformers.utils.chat_template_utils import get_json_schema

    if not inspect.isclass(environment):
        raise TaskError(f"environment {spec!r} must be a class {_TAKES}")
    methods = {
        name: value
        for name, value in inspect.getmembers(environment, callable)
        if not name.startswith("_")
    }
    tools = []
    for name in [name for name in methods if name not in (RESET, REWARD)]:
        try:
            tools.append(get_json_schema(methods[name]))
        except Exception as error:  # of transformers, or what annotations raise
            raise TaskError(
                f"environment {spec!r}: the tool {name!r} cannot be described: {error}; give it"
                " types and a docstring with an 'Args:' section, or begin its name with _"
            ) from error
    if not tools:
        raise TaskError(
            f"environment {spec!r} has no public method but {sorted(methods)}; its public methods"
            " are the tools"
        )
    return Description(tuple(tools), frozenset(methods))


def _converse(
    connection: Connection, life: int, environment: Callable[[], Any], time_limit: float
) -> None:
    """A fork's whole life. life: see `end_with`."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # for what tools start
    end_with(life)
    instance: Any = None
    try:
        with asyncio.Runner() as runner:
            while True:
                call: Call = connection.recv()
                _seed(call.seed)
                with _timed(time_limit):
                    if instance is None:
                        instance = attempt(environment)
                    outcome = (
                        instance
                        if isinstance(instance, Failure)
                        else attempt(_called, runner, instance, call)
                    )
                connection.send(_as_text(outcome) if call.name != REWARD else sendable(outcome))
    finally:  # whatever the tools did, and without what the host would do at its end
        os._exit(0)


def _called(runner: asyncio.Runner, instance: Any, call: Call) -> Any:
    method, arguments = getattr(instance, call.name), call.arguments
    parameters = inspect.signature(method).parameters.values()
    if call.name == RESET and not any(p.kind is p.VAR_KEYWORD for p in parameters):
        arguments = {p.name: arguments[p.name] for p in parameters if p.name in arguments}
    try:
        outcome = method(**arguments)
        return runner.run(outcome) if inspect.iscoroutine(outcome) else outcome
    except (Exception, SystemExit) as error:
        if call.name in (RESET, REWARD):
            raise
        # the policy is not told in which file and line
        return Failure(f"{type(error).__name__}: {error}")


@contextmanager
def _timed(seconds: float) -> Iterator[None]:
    """Raise `TimeoutError` in what is called within; a call that cannot be interrupted is ended by
    the parent.
    """

    def ring(*_: Any) -> None:
        raise TimeoutError(too_long(seconds))

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _seed(seed: str) -> None:
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(random.getrandbits(32))


def _as_text(outcome: Any) -> Any:
    """None and a `Failure` as they are, texts cut off at `LONGEST`, other values as JSON."""
    if isinstance(outcome, bytes | bytearray):
        return Failure(f"returned {len(outcome)} bytes; return text")
    if not isinstance(outcome, str | Failure) and outcome is not None:
        try:
            outcome = json.dumps(outcome, ensure_ascii=False, default=str)
        except Exception as error:
            return Failure(
                f"returned a {type(outcome).__name__} that is neither text nor JSON: {error}"
            )
    if isinstance(outcome, str) and len(outcome) > LONGEST:
        return f"{outcome[:LONGEST]}… ({len(outcome)} characters, cut off)"
    return outcome
