"""The child process in which an environment of the package verifiers lives, with its tools, agents
and rewards.

    python -c "from qarl.tasks.verifiers_host import serve; serve(FD)"          (see
    `qarl.tasks.verifiers`)

Over the pipe comes one `Job`, answered by how its tasks begin, or in words by why there is none;
then file descriptors, each a conversation's pipe, on which come a task's place and the URL of the
policy, answered by an `Outcome`. A pipe that is closed before that ends the conversation.
"""

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Any

from qarl.configs.functions import in_words
from qarl.tasks.base import Message, TaskError
from qarl.tasks.worker import begin

Begins = tuple[str, tuple[Message, ...]]
"""A task's key, the same in every run, and its first messages, without its tools; () where a user
speaks later.
"""


@dataclass(frozen=True)
class Outcome:
    """reward: None where it failed, for the reasons in `words`."""

    reward: float | None
    words: str = "no error"


def serve(fd: int) -> None:
    """The host's whole life: until the parent closes the pipe, or is gone."""
    connection, job = begin(fd)
    try:
        environment = load(job.spec, job.options)
        tasks = list(environment.taskset)
        connection.send([_begins(task) for task in tasks])
    # a package's own, at its import or at its data
    except (Exception, SystemExit) as error:
        words = str(error) if isinstance(error, TaskError) else in_words(error)
        connection.send(f"task verifiers:{job.spec}: {words}")
        return
    asyncio.run(_serve(connection, environment, tasks))


def load(name: str, options: dict[str, Any]) -> Any:
    """The environment. options: verifiers' own `[env]` section. Raises `TaskError` for one that is
    not for a single policy, or has no end, and whatever verifiers does.
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
    config = vf.resolve_env_config(
        {**options, "taskset": {**options.get("taskset", {}), "id": name}}
    )
    if len(agents := agent_config_fields(config)) != 1:
        raise TaskError(
            f"it has {len(agents)} agents, {', '.join(agents)}, but a conversation has one policy"
        )
    environment = vf.load_environment(config)
    if not environment.taskset.bounded:
        raise TaskError("its tasks have no end; give options that bound them")
    return environment


def _begins(task: Any) -> Begins:
    data = task.data
    chat = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    if data.prompt is not None:
        chat += [{"role": "user", "content": data.prompt_text}]
    return task.key, tuple(chat)


async def _serve(connection: Connection, environment: Any, tasks: list[Any]) -> None:
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    running: set[asyncio.Task[None]] = set()

    def begun() -> None:
        try:
            pipe = Connection(recv_handle(connection))
        except (EOFError, OSError):  # the parent closed the pipe, or is gone
            loop.remove_reader(connection.fileno())
            ended.set()
        else:
            running.add(conversation := loop.create_task(_conversation(pipe, environment, tasks)))
            conversation.add_done_callback(running.discard)

    loop.add_reader(connection.fileno(), begun)
    async with environment.serving():
        await ended.wait()
        for conversation in running:
            conversation.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _conversation(pipe: Connection, environment: Any, tasks: list[Any]) -> None:
    from verifiers import v1 as vf  # pyright: ignore[reportAttributeAccessIssue]

    loop, myself, fd = asyncio.get_running_loop(), asyncio.current_task(), pipe.fileno()
    assert myself is not None
    try:
        number, url = pipe.recv()
        # the parent closed it
        loop.add_reader(fd, lambda: loop.remove_reader(fd) and myself.cancel())
        policy = vf.ModelContext(
            model="policy",
            client=vf.EvalClientConfig(base_url=url, api_key_var="QARL_NO_KEY"),
        )
        try:
            outcome = _outcome(
                await environment.run_slot(*environment.slots(tasks[number]), policy)
            )
        except Exception as error:  # the host goes on with the other conversations
            outcome = Outcome(None, in_words(error))
        with suppress(OSError):
            pipe.send(outcome)
    finally:
        loop.remove_reader(fd)
        pipe.close()


def _outcome(episode: Any) -> Outcome:
    errors = [
        *episode.errors,
        *(error for trace in episode.traces for error in trace.errors),
    ]
    if not episode.ok:
        return Outcome(
            None,
            "; ".join(f"{error.type}: {error.message}" for error in errors)
            or "it was not finished",
        )
    return Outcome(sum(trace.reward for trace in episode.traces))
