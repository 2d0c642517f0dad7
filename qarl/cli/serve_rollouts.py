"""`qarl serve-rollouts`: start servers that runs sample on.

They have the settings of the engine that such a run would have.
"""

import argparse
import ipaddress
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from qarl.cli.environment import quiet_libraries
from qarl.cli.help import add_flags
from qarl.cli.options import add_count, say
from qarl.cli.serve import ServeError, require_free
from qarl.configs.load import chosen_config
from qarl.configs.schema.run import RunConfig
from qarl.report.startup import phase, phases_shown_on
from qarl.rollout.open import serve_rollouts
from qarl.rollout.servers.vllm.access import KEY_VARIABLE, server_key
from qarl.tasks import load_task


def add_serve_rollouts(commands: Any) -> None:
    """Add `qarl serve-rollouts` to the commands."""
    serve = commands.add_parser(
        "serve-rollouts",
        help="Start vLLM servers that runs sample on (rollout.servers).",
        usage="qarl serve-rollouts [--replicas N] [OPTIONS OF qarl train] [-- VLLM OPTIONS]",
        description=(
            "Start vLLM servers with a configuration's policy, for runs of that configuration to"
            " sample on, until Ctrl-C or SIGTERM. Runs publish their weights to the servers"
            " (docs/guide/servers.md)."
        ),
        epilog=(
            "Options after -- are passed to vLLM and override others, except that address and key"
            " are not allowed there: qarl serve-rollouts --replicas 4 -- --max-num-batched-tokens"
            " 16384. Ranks are the configuration's: --devices 2 --rollout.tensor_parallel_size 2"
        ),
    )
    serve.add_argument(
        "--config",
        metavar="FILE",
        help="YAML file, or a shipped name. Default: as `qarl train`.",
    )
    add_count(serve, "--replicas", "Number of servers to start.", 1)
    add_count(serve, "--devices", "GPUs per server.", 1)
    serve.add_argument(
        "--host", default="127.0.0.1", help="Address to listen at. Default: 127.0.0.1."
    )
    serve.add_argument(
        "--port",
        type=int,
        default=8100,
        metavar="N",
        help="Port of the first server; the others take the next ones. Default: 8100.",
    )
    serve.add_argument(
        "--key-file",
        metavar="FILE",
        help=f"File with the API key that the servers require. Default: that in {KEY_VARIABLE}.",
    )
    add_flags(serve)
    serve.set_defaults(run=_serve_rollouts, engine=True)


def _serve_rollouts(known: argparse.Namespace, console: Console) -> int:
    config = chosen_config(known.config, known.overrides)
    key = server_key(known.key_file or config.rollout.server_key_file)
    for word in (word for word in known.to_vllm if word[:1] == "-"):
        # vLLM accepts abbreviations, too
        option = word.partition("=")[0].replace("_", "-")
        if any(ours.startswith(option) for ours in ("--host", "--port", "--api-key")):
            raise ServeError(
                f"{word} behind -- would bypass the key; give --host, --port and --key-file"
                " before it"
            )
        if option == "-tp" or (len(option) > 3 and "--tensor-parallel-size".startswith(option)):
            raise ServeError(
                f"{word} behind -- would be unknown to the runs' learner, which sums as the ranks"
                " do; give --rollout.tensor_parallel_size before it, and to the runs"
            )
        by_experts = option == "-ep" or (
            option.startswith("--enable-ex") and "--enable-expert-parallel".startswith(option)
        )
        if by_experts and config.rollout.tensor_parallel_size > 1:
            raise ServeError(
                f"{word} behind -- would give each rank whole experts, and the runs' learner sums"
                " the ranks' parts of every expert; omit it"
            )
    require_key(known.host, key)
    ports = range(known.port, known.port + known.replicas)
    for port in ports:
        require_free(known.host, port)
    quiet_libraries()
    with (
        tempfile.TemporaryDirectory(prefix="qarl-servers-") as folder,
        phases_shown_on(console),
    ):
        checkpoint = Path(folder) / "checkpoint"
        _write_checkpoint(config, checkpoint, known.replicas, known.devices)
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        say(
            console,
            f"starting {known.replicas} of vLLM's servers; what they print is in {folder}",
        )
        with serve_rollouts(
            checkpoint,
            config.rollout,
            config.dtype,
            ports,
            known.host,
            key,
            known.to_vllm,
            known.devices,
        ) as replicas:
            with_key = "" if key is None else " (with the key)"
            urls = ",".join(replica.url for replica in replicas)
            say(
                console,
                f"ready{with_key}: qarl train … --rollout.servers {urls}; Ctrl-C ends them",
            )
            while all(replica.process.poll() is None for replica in replicas):
                time.sleep(0.5)
            ended = next(replica for replica in replicas if replica.process.poll() is not None)
            last = "\n".join(ended.log.read_text(errors="replace").splitlines()[-8:])
            say(
                console,
                f"the server at {ended.url} ended, so do all; its log ends:\n{last}",
            )
            return 1


def require_key(host: str, key: str | None) -> None:
    """Raise `ServeError` if other machines can reach `host` and there is no key."""
    try:
        local = ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = host == "localhost"
    if key is None and not local:
        raise ServeError(
            f"--host {host} is reached from other machines, and whoever can ask a server can load"
            f" weights into it; give it a key (--key-file, or {KEY_VARIABLE} in the environment)"
        )


def _write_checkpoint(config: RunConfig, folder: Path, replicas: int, devices: int) -> None:
    """Write the checkpoint that the servers start on: the configuration's policy, as its run would
    export it.

    Raises `ConfigError` if `replicas` servers of `devices` GPUs each cannot have the ranks.
    """
    with phase("importing torch and transformers"):
        from qarl.preflight.prompts import check_prompts
        from qarl.preflight.support import require_room_for_ranks, require_schemes
        from qarl.run.policy import open_policy
        from qarl.sync.export import export_checkpoint
    require_room_for_ranks(config, replicas, devices)
    with phase("writing the policy's checkpoint"):
        architecture = require_schemes(config)
        inputs = check_prompts(config, load_task(config.task), architecture)
        policy = open_policy(config, inputs=inputs)
        export_checkpoint(policy.model, policy.folder, folder)
