"""`qarl serve`: serve a run's export through vLLM's OpenAI-compatible API, with the settings of the
engine that proved it.
"""

import argparse
import json
import os
import shlex
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console

from qarl.cli.environment import quiet_libraries
from qarl.cli.options import say
from qarl.configs.errors import InputError
from qarl.quant.checkpoint.folder import has_chat_template, read_config, weight_files
from qarl.quant.runtime.libraries import SERVED
from qarl.report.run_folder import RunFolder
from qarl.rollout.servers.vllm.chat import request_fields
from qarl.rollout.servers.vllm.start import is_ready, server_command
from qarl.rollout.types import ServerSpec
from qarl.run.export_note import changes_in_words, noted_defaults, read_note

OTHERWISE = {
    "chat-template": "questions are written by another template",
    "default-chat-template-kwargs": "the template gets other arguments",
    "tokenizer": "questions are read by another tokenizer",
    "generation-config": "answers are sampled by another generation config",
    "override-generation-config": "answers are sampled by other settings",
    "dtype": "the model computes in another dtype",
    "quantization": "the weights are read by another scheme",
    "kv-cache-dtype": "keys and values are kept in another dtype",
    "hf-overrides": "the model has another config",
}
"""Option of vLLM → what differs from the evaluation if a server has it."""


class ServeError(InputError, heading="serve"):
    """Raised for a folder that cannot be served, or an address that cannot be listened at."""


def add_serve(commands: Any) -> None:
    """Add `qarl serve` to the commands."""
    serve = commands.add_parser(
        "serve",
        help="Serve a run's export through vLLM's OpenAI-compatible API.",
        usage="qarl serve TARGET [--host HOST] [--port N] [-- VLLM OPTIONS]",
        description=(
            "Serve a run's export through vLLM's OpenAI-compatible API, until Ctrl-C or SIGTERM."
        ),
        epilog=(
            "Options after -- are passed to vLLM and override others: qarl serve runs/NAME --"
            " --max-model-len 4096 --api-key KEY"
        ),
    )
    serve.add_argument(
        "target",
        metavar="TARGET",
        help="Run folder (its export), or an exported checkpoint.",
    )
    serve.add_argument(
        "--host",
        default="127.0.0.1",
        help=(
            "Address to listen at. Set 0.0.0.0 for other machines to reach it. Default: 127.0.0.1,"
            " this machine alone."
        ),
    )
    serve.add_argument(
        "--port",
        type=int,
        default=8000,
        metavar="N",
        help="Port to listen at. Default: 8000.",
    )
    serve.set_defaults(run=_serve, engine=True)


def _serve(known: argparse.Namespace, console: Console) -> int:
    served = find_served(Path(known.target))
    require_free(known.host, known.port)
    host = f"[{known.host}]" if ":" in known.host else known.host
    url = f"http://{host}:{known.port}"
    length = ""
    if served.max_model_len is not None:
        length = f", {served.max_model_len} tokens of prompt and answer"
    say(console, f"starting vLLM on {served.folder}{length}; Ctrl-C ends it")
    if not has_chat_template(served.folder):
        say(
            console,
            "it has no chat template: ask /v1/completions, not /v1/chat/completions",
        )
    notes = (needed_fields(served), changes_in_words(served.folder))
    for line in (*notes, *asked_otherwise(known.to_vllm)):
        if line is not None:
            say(console, line)
    quiet_libraries()
    command = server_command(served, known.host, known.port, known.to_vllm)
    sys.stdout.flush()
    if os.fork() == 0:
        _announce(url, served.name, os.getppid())
    # SERVED makes the engine process end with the server
    os.execve(command[0], command, {**os.environ, SERVED: "1"})


def _announce(url: str, name: str, server: int) -> NoReturn:
    """Print when the server answers, then exit. A child process runs this beside the server.

    server: its process id.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    start = time.monotonic()
    while os.getppid() == server:
        if is_ready(url):
            seconds = time.monotonic() - start
            os.write(1, f"ready after {seconds:.0f} s: {url}/v1, model {name!r}\n".encode())
            break
        time.sleep(0.5)
    os._exit(0)


def find_served(target: Path) -> ServerSpec:
    """Return what a run folder or an exported checkpoint is served with. Raises `ServeError` if
    `target` is neither.
    """
    if not target.is_dir():
        raise ServeError(
            f"there is no folder {str(target)!r}; give a run folder, or a checkpoint `qarl export`"
            " wrote"
        )
    run = (target / "config.yaml").is_file()
    folder = RunFolder(target).export if run else target
    if run and not folder.is_dir():
        RunFolder(target).require_checkpoint()
        quoted = shlex.quote(str(target))
        raise ServeError(
            f"run {str(target)!r} has no export; write one of its newest checkpoint (qarl export"
            f" {quoted} -o DIR) and serve that, or, where steps are left, finish it (qarl train"
            f" --resume {quoted})"
        )
    dtype = read_config(folder).get("dtype")
    name = target.resolve().name
    if dtype is None or not weight_files(folder):
        lacks = (
            "names no dtype in its config.json"
            if dtype is None
            else "has no weights (*.safetensors)"
        )
        raise ServeError(
            f"{str(folder)!r} {lacks}; give a run folder, or a checkpoint `qarl export` wrote"
        )
    note = read_note(folder)
    if not note:
        return ServerSpec(folder=folder, name=name, dtype=dtype)
    length = note["max_prompt_tokens"] + note["max_new_tokens"]
    return ServerSpec(
        folder=folder,
        name=name,
        dtype=note["dtype"],
        max_model_len=length,
        kv_cache_gib=note["kv_cache_gib"] or 1,
        # a generation config cannot hold 0, so the export's has no temperature then
        temperature=0.0 if noted_defaults(note).greedy else None,
    )


def needed_fields(served: ServerSpec) -> str | None:
    """Return a line on what requests have to carry to be asked as the evaluation did, or None."""
    fields = request_fields(noted_defaults(read_note(served.folder)))
    fields.pop("temperature", None)
    if not fields:
        return None
    return f"requests have to give what answers were measured with: {json.dumps(fields)}"


def asked_otherwise(options: Sequence[str]) -> list[str]:
    """Return a line for each of these options of vLLM that changes what a plain request is answered
    with.
    """
    names = [word.partition("=")[0][2:].replace("_", "-") for word in options if word[:2] == "--"]
    return [
        f"--{name}: {OTHERWISE[name]} than in the evaluation, so its figures do not hold for these"
        " answers; omit the option to be answered as evaluated"
        for name in names
        if name in OTHERWISE
    ]


def require_free(host: str, port: int) -> None:
    """Raise `ServeError` if nothing can listen at `host`:`port`."""
    if not 1 <= port <= 65535:
        raise ServeError(f"--port {port} is not a port; allowed are 1 to 65535")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise ServeError(
            f"cannot listen at {host}:{port}: {error}; give another --port or --host"
        ) from error
