"""The child process of an environment of the package verifiers, with its tools, agents and rewards.

    python -c "from qarl.tasks.verifiers_host import serve; serve(FD)"          (see
    `qarl.tasks.verifiers`)

The parent first sends one `Job`. The reply lists how the environment's tasks begin, or says as a
text why there is no environment. Then the parent sends file descriptors, each the pipe of a
conversation. Such a pipe receives the index of a task and the URL of the policy, and answers with
an `Outcome`. If the parent closes it before that, the conversation ends.
"""

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Any

from qarl.configs.functions import describe_error
from qarl.tasks.base import Message, TaskError
from qarl.tasks.worker import begin

Begins = tuple[str, tuple[Message, ...]]
"""(key, first messages) of a task, without its tools. The key is the same in every run.

The messages are () if a user speaks only later.
"""


@dataclass(frozen=True)
class Outcome:
    """Result of a conversation."""

    reward: float | None
    """The reward; None if the conversation failed."""
    words: str = "no error"
    """Reasons of the failure."""


def serve(fd: int) -> None:
    """Run the host until the parent closes the pipe or ends."""
    connection, job = begin(fd)
    try:
        environment = load(job.spec, job.options)
        tasks = list(environment.taskset)
        connection.send([_begins(task) for task in tasks])
    # A package may raise anything when it is imported or loads its data.
    except (Exception, SystemExit) as error:
        words = str(error) if isinstance(error, TaskError) else describe_error(error)
        connection.send(f"task verifiers:{job.spec}: {words}")
        return
    asyncio.run(_serve(connection, environment, tasks))


def load(name: str, options: dict[str, Any]) -> Any:
    """Load the environment.

    options: verifiers' own `[env]` section. Raises `TaskError` if the environment is not for a
    single policy or has no end, and whatever verifiers raises.
    """
    try:
        from verifiers import v1 as vf  # pyright: ignore[reportAttributeAccessIssue]
        from verifiers.v1.configs.agent import (  # pyright: ignore[reportMissingImports]
            agent_config_fields,
        )
    except ImportError as error:
        raise TaskError(
            f"verifiers cannot be imported: {error}; pip install 'verifiers>=0.4,<0.5'"
        ) from error
    taskset = {**options.get("taskset", {}), "id": name}
    config = vf.resolve_env_config({**options, "taskset": taskset})
    agents = agent_config_fields(config)
    if len(agents) != 1:
        raise TaskError(
            f"environment {name!r} has {len(agents)} agents ({', '.join(agents)}), and a"
            " conversation has one policy; choose an environment with one agent"
        )
    environment = vf.load_environment(config)
    if not environment.taskset.bounded:
        raise TaskError(
            f"environment {name!r} has tasks without end; give options that bound their number"
        )
    return environment


def _begins(task: Any) -> Begins:
    data = task.data
    chat = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    if data.prompt is not None:
        chat += [{"role": "user", "content": data.prompt_text}]
    return task.key, tuple(chat)


async def _serve(connection: Connection, environment: Any, tasks: list[Any]) -> None:
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    running: set[asyncio.Task[None]] = set()

    def start_conversation() -> None:
        try:
            pipe = Connection(recv_handle(connection))
        except (EOFError, OSError):  # the parent closed the pipe, or ended
            loop.remove_reader(connection.fileno())
            ended.set()
        else:
            conversation = loop.create_task(_conversation(pipe, environment, tasks))
            running.add(conversation)
            conversation.add_done_callback(running.discard)

    loop.add_reader(connection.fileno(), start_conversation)
    async with environment.serving():
        await ended.wait()
        for conversation in running:
            conversation.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _conversation(pipe: Connection, environment: Any, tasks: list[Any]) -> None:
    from verifiers import v1 as vf  # pyright: ignore[reportAttributeAccessIssue]

    loop = asyncio.get_running_loop()
    this_task = asyncio.current_task()
    fd = pipe.fileno()
    assert this_task is not None
    try:
        number, url = pipe.recv()
        # The parent sends nothing more: if the pipe becomes readable, the parent closed it.
        loop.add_reader(fd, lambda: loop.remove_reader(fd) and this_task.cancel())
        policy = vf.ModelContext(
            model="policy",
            client=vf.EvalClientConfig(base_url=url, api_key_var="QARL_NO_KEY"),
        )
        try:
            slots = environment.slots(tasks[number])
            outcome = _outcome(await environment.run_slot(*slots, policy))
        except Exception as error:  # must not end the other conversations
            outcome = Outcome(None, describe_error(error))
        with suppress(OSError):
            pipe.send(outcome)
    finally:
        loop.remove_reader(fd)
        pipe.close()


def _outcome(episode: Any) -> Outcome:
    errors = list(episode.errors)
    for trace in episode.traces:
        errors += trace.errors
    if not episode.ok:
        words = "; ".join(f"{error.type}: {error.message}" for error in errors)
        return Outcome(None, words or "it was not finished")
    return Outcome(sum(trace.reward for trace in episode.traces))
