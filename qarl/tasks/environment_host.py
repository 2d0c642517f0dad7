"""The child processes of an environment class: a host, and one fork of it per conversation.

    python -c "from qarl.tasks.environment_host import serve; serve(FD)"          (see
    `qarl.tasks.environments`)

The host imports the class. The parent first sends the host one `Job`. The reply is a `Description`,
or a text that says why the class cannot be used. Then the parent sends file descriptors, each the
pipe of a conversation, and the host answers with the process at its other end. That process
receives one `Call` after another, and answers each with what the method returned, or with a
`Failure`.
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
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Any

from qarl.configs.functions import FunctionKind, load_function
from qarl.quant.runtime.parent import leave_stop_signals_to_the_parent
from qarl.tasks.base import Failure, TaskError
from qarl.tasks.rewards import attempt, failure_of
from qarl.tasks.signatures import is_pending, settled, too_long
from qarl.tasks.worker import begin, end_with, sendable

RESET = "reset"
REWARD = "get_reward"
LONGEST = 100_000
"""Upper bound on a tool's result, in characters; the rest is cut off."""
_TAKES = "with public methods as its tools (docs/guide/conversations.md)"


@dataclass(frozen=True)
class Description:
    """The public methods of an environment class."""

    tools: tuple[dict[str, Any], ...]
    """JSON schemas of the tools, for chat templates."""
    methods: frozenset[str]
    """Names of all public methods, including `reset` and `get_reward`."""


@dataclass(frozen=True)
class Call:
    """Call of a method."""

    name: str
    """Name of the method."""
    arguments: dict[str, Any]
    """Keyword arguments. `reset` gets only those that it takes."""
    seed: str
    """Seed of `random`, and of numpy if it is imported, so that a repeated run draws the same."""


def serve(fd: int) -> None:
    """Run the host until the parent closes the pipe or ends."""
    parent_alive = os.dup(0)
    connection, job = begin(fd)
    try:
        kind = FunctionKind(job.word, _TAKES, TaskError, "class")
        environment: Any = load_function(kind, job.spec)
    except TaskError as error:
        return connection.send(str(error))
    # A fork imports transformers, so that the host stays small and its later forks quick.
    pid = os.fork()
    if pid == 0:
        try:
            try:
                connection.send(describe(job.spec, environment))
            # `TaskError`, and whatever is wrong with transformers
            except Exception as error:
                connection.send(str(error))
            os._exit(0)
        finally:  # nothing was sent
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    if code != 0:  # nothing was sent
        ending = f"signal {-code}" if code < 0 else f"exit status {code}"
        return connection.send(
            f"environment {job.spec!r}: describing its tools ended its process ({ending}); is"
            " memory short?"
        )
    # The system collects the forks that ended.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with suppress(EOFError, OSError):  # the parent closed the pipe, or ended
        while True:
            pipe = recv_handle(connection)
            pid = os.fork()
            if pid == 0:
                connection.close()
                _converse(Connection(pipe), parent_alive, environment, job.time_limit)
            os.close(pipe)
            connection.send(pid)


def describe(spec: str, environment: Any) -> Description:
    """Return the description of an environment class, or of a partial of one.

    Raises `TaskError` if it is no class, has no tool, or has a tool without docstring or types.
    """
    from transformers.utils.chat_template_utils import get_json_schema

    while isinstance(environment, partial):
        environment = environment.func
    if not inspect.isclass(environment):
        raise TaskError(f"environment {spec!r} must be a class {_TAKES}")
    methods = {
        name: value
        for name, value in inspect.getmembers(environment, callable)
        if not name.startswith("_")
    }
    tools = []
    for name, method in methods.items():
        if name in (RESET, REWARD):
            continue
        try:
            tools.append(get_json_schema(method))
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
    connection: Connection, parent_alive: int, environment: Callable[[], Any], time_limit: float
) -> None:
    """Run the fork of one conversation. It never returns.

    parent_alive: see `end_with`.
    """
    os.setsid()
    leave_stop_signals_to_the_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # for what tools start
    end_with(parent_alive)
    instance: Any = None
    try:
        with asyncio.Runner() as runner:
            while True:
                call: Call = connection.recv()
                _seed(call.seed)
                try:
                    with _timed(time_limit):
                        if instance is None:
                            instance = attempt(environment)
                        if isinstance(instance, Failure):
                            outcome = instance
                        else:
                            outcome = attempt(_call_method, runner, instance, call)
                except TimeoutError as error:  # the alarm rang after the method had returned
                    outcome = failure_of(error)
                connection.send(sendable(outcome) if call.name == REWARD else _as_text(outcome))
    finally:  # whatever the tools did, and without the exit handlers of the host
        os._exit(0)


def _call_method(runner: asyncio.Runner, instance: Any, call: Call) -> Any:
    """Call a method of the instance and return its outcome.

    Errors of tools become `Failure`s; those of `reset` and `get_reward` are raised.
    """
    method = getattr(instance, call.name)
    arguments = call.arguments
    parameters = inspect.signature(method).parameters.values()
    if call.name == RESET and not any(p.kind is p.VAR_KEYWORD for p in parameters):
        arguments = {p.name: arguments[p.name] for p in parameters if p.name in arguments}
    try:
        outcome = method(**arguments)
        return runner.run(settled(outcome)) if is_pending(outcome) else outcome
    except (Exception, SystemExit) as error:
        if call.name in (RESET, REWARD):
            raise
        # Without file and line, because the policy reads this.
        return Failure(f"{type(error).__name__}: {error}")


@contextmanager
def _timed(seconds: float) -> Iterator[None]:
    """Raise `TimeoutError` in the code inside after `seconds`.

    A call that cannot be interrupted is ended by the parent.
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
    """Return an outcome as text: values as JSON, cut off at `LONGEST`.

    None and a `Failure` stay as they are.
    """
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
