"""`qarl train --processes 2` with real engines, and `qarl train` on servers.

Processes share the sampling, are interrupted, die, and change in number. A run on servers equals a
run without them, also with a fault (`scripts/server_faults.py` makes more).
"""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest

from qarl.report.run_folder import read_metrics
from qarl.report.token_files import step_file
from qarl.rollout.servers.vllm.start import free_ports
from qarl.run.checkpoint import list_checkpoints, load_checkpoint
from tests.support import forks
from tests.support.profiles import thorough
from tests.support.runs import (
    ROOT,
    SMALL,
    Run,
    command,
    environment,
    lines,
    succeeded,
    wait_for_lines,
)
from tests.support.two_machines import kill_tree, two_machines

SHORT = (
    "--rollout.prompts",
    "16",
    "--rollout.samples",
    "4",
    "--eval.problems",
    "0",
    "--export",
    "false",
)
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def started(
    *arguments: str,
    launcher: list[str] | None = None,
) -> subprocess.Popen[str]:
    """Start `qarl ARGUMENTS` without a terminal."""
    return subprocess.Popen(
        command(*arguments) if launcher is None else [*launcher, *arguments],
        env=environment(),
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def wait_for_checkpoint(run: Path, process: subprocess.Popen[Any], seconds: float = 400) -> None:
    deadline = time.monotonic() + seconds
    while not list_checkpoints(run / "checkpoints"):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
        time.sleep(0.2)


def wait_for_text(log: Path, text: str, process: subprocess.Popen[Any]) -> None:
    """Wait until a command's log has a text."""
    deadline = time.monotonic() + 400
    while text not in log.read_text():
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.2)


@pytest.mark.slow
def test_two_processes_train_interrupt_and_go_on_in_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Check two processes that share the masters, with an engine each.

    The first batch is that of one process: prompts and seeds are the same, wherever they are
    sampled. Learner and sampler agree. SIGTERM completes the present step with a checkpoint,
    and one process continues from it. The processes are forks; the next test has
    separate interpreters.
    """
    two = tmp_path / "two"
    one = tmp_path / "one"
    # a rate that does not depend on the number of steps
    steady = ("--learner.optimizer.decay_steps", "0")
    adamw = (
        "--optimizer",
        "adamw",
        *SHORT,
        *steady,
        "--checkpoint-every",
        "1",
        "--record",
        "all",
    )
    launched = ("--processes", "2", "--steps", "500")
    with monkeypatch.context() as patch:
        patch.setenv("PYTHON_EXEC", str(forks.interpreter(tmp_path)))
        process = Run("train", *launched, "--output", two, *adamw)
    wait_for_lines(process, two / "metrics.jsonl", 1)
    # as a scheduler does: to every process of the job, so that some receive it twice
    launcher = psutil.Process(process.pid)
    for each in [launcher, *launcher.children(recursive=True)]:
        each.send_signal(signal.SIGTERM)
    done = process.wait()
    assert done.returncode == 143, done.stdout + done.stderr
    assert "processes: 2" in done.stdout
    assert done.stdout.count("run folder:") == 1
    step = load_checkpoint(two / "checkpoints").step
    seen = read_metrics(two / "metrics.jsonl")
    assert [line["step"] for line in seen] == list(range(1, step + 1))
    succeeded("train", "--steps", "1", "--output", one, *adamw)
    (alone,) = read_metrics(one / "metrics.jsonl")
    for name in ("prompts", "reward", "response_tokens", "mixed_reward_groups"):
        assert seen[0][name] == alone[name], name
    assert seen[0]["learn/mismatch/mean_abs"] == pytest.approx(
        alone["learn/mismatch/mean_abs"], abs=2e-4
    )
    assert seen[0]["learn/grad_norm"] == pytest.approx(alone["learn/grad_norm"], rel=1e-2)
    shared, whole = (pq.read_table(step_file(run / "tokens", 1)).to_pylist() for run in (two, one))
    # what each process had of the updates is put together
    for ours, theirs in zip(shared, whole, strict=True):
        assert ours["token_id"] == theirs["token_id"]
        assert ours["advantage"] == theirs["advantage"]
        assert ours["learner_logprob"] == pytest.approx(theirs["learner_logprob"], abs=0.05)
        assert [ratio is None for ratio in ours["log_ratio"]] == [
            ratio is None for ratio in theirs["log_ratio"]
        ]
    succeeded(
        "train",
        "--resume",
        two,
        "--steps",
        str(step + 1),
    )
    assert [line["step"] for line in read_metrics(two / "metrics.jsonl")] == list(
        range(1, step + 2)
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "deepspeed",
    [
        False,
        pytest.param(
            True,
            marks=pytest.mark.skipif(
                not thorough(), reason="a second run is a minute of CPU; `make test-thorough`"
            ),
        ),
    ],
)
def test_where_a_process_dies_the_others_stop(tmp_path: Path, deepspeed: bool):
    """Check that the run ends within a minute and fails, with no process left.

    The checkpoint is intact. A run that DeepSpeed steps goes on from it in one process.
    """
    run = tmp_path / "run"
    launched = ("--processes", "2", "--steps", "500", "--checkpoint-every", "1")
    if deepspeed:
        file = tmp_path / "deepspeed.json"
        file.write_text(json.dumps({"zero_optimization": {"stage": 2}}))
        launched += ("--optimizer", "adamw", "--learner.deepspeed", str(file))
        launched += ("--learner.optimizer.decay_steps", "0")
    process = started("train", *launched, "--output", str(run), *SHORT)
    wait_for_checkpoint(run, process)
    ranks = psutil.Process(process.pid).children()
    assert len(ranks) == 2
    listening = [
        c.laddr.ip
        for rank in ranks
        for c in rank.net_connections()
        if c.status == psutil.CONN_LISTEN
    ]
    assert listening
    assert {*listening} <= {"127.0.0.1", "::1"}
    killed = time.monotonic()
    ranks[1].kill()
    printed, _ = process.communicate(timeout=60)
    assert time.monotonic() - killed < 60
    assert process.returncode == 128 + signal.SIGKILL, printed
    assert not any(rank.is_running() for rank in ranks)
    checkpoint = load_checkpoint(run / "checkpoints")
    assert checkpoint.step >= 1
    assert checkpoint.state["position"]["step"] == checkpoint.step
    if deepspeed:
        resumed = succeeded("train", "--resume", run, "--steps", str(checkpoint.step + 1))
        assert "DeepSpeed steps the masters: ZeRO 2" in resumed.stdout
        assert [line["step"] for line in read_metrics(run / "metrics.jsonl")] == list(
            range(1, checkpoint.step + 2)
        )


def test_where_the_launcher_is_killed_no_process_is_left(tmp_path: Path):
    sleeper = tmp_path / "sleeper"
    sleeper.write_text("#!/bin/sh\nexec sleep 300\n")
    sleeper.chmod(0o755)
    code = (
        "import sys\nfrom qarl.cli import launch\nsys.executable ="
        f" {str(sleeper)!r}\nlaunch.launch([], 2)"
    )
    launcher = psutil.Popen([sys.executable, "-c", code], env=environment())
    deadline = time.monotonic() + 60
    while len(ranks := launcher.children()) < 2 or any(rank.name() != "sleep" for rank in ranks):
        assert launcher.is_running()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    launcher.kill()
    _, alive = psutil.wait_procs(ranks, timeout=20)
    assert all(process.status() == psutil.STATUS_ZOMBIE for process in alive)


@pytest.mark.slow
def test_torchrun_starts_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Check that torchrun launches the command unchanged.

    Wrong input is reported once, and no run folder is made.
    """
    monkeypatch.setenv("PYTHON_EXEC", str(forks.interpreter(tmp_path)))
    launch = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", "-m", "qarl"]
    run = tmp_path / "run"
    given = [
        "train",
        "--output",
        str(run),
        "--steps",
        "1",
        *SHORT[2:],
        "--rollout.prompts",
    ]
    with (tmp_path / "log").open("a") as log:
        wrong = subprocess.run(
            [*launch, *given, "15"],
            env=environment(),
            stdout=log,
            stderr=log,
            timeout=300,
        )
    assert wrong.returncode != 0
    assert not run.exists()
    assert (tmp_path / "log").read_text().count(
        "rollout.prompts 15 is not a multiple of 2 processes"
    ) == 1
    if not thorough():  # `--processes 2` above starts processes by the same launcher
        return
    monkeypatch.delenv("PYTHON_EXEC")
    right = subprocess.run(
        [*launch, *given, "16"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert right.returncode == 0, right.stderr
    assert [
        json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()
    ] == [1]


@pytest.mark.slow
@pytest.mark.skipif(
    not thorough(),
    reason="two runs of two processes are two minutes of CPU; `make test-thorough`",
)
def test_two_nodes_are_two_processes(tmp_path: Path):
    """Check that torchrun on two nodes makes the run of `--processes 2`.

    Each node is started separately, with its rank. Every metric and every digest is equal. Blind
    spot: both nodes are this machine and share a file system.
    """
    given = (
        "--steps",
        "2",
        *SHORT,
        "--sync.canary_every",
        "1",
        "--checkpoint-every",
        "1",
    )
    alone = started("train", "--processes", "2", "--output", str(tmp_path / "one"), *given)
    printed, _ = alone.communicate(timeout=400)
    assert alone.returncode == 0, printed
    port = str(free_ports(1)[0])
    two = ("train", "--output", str(tmp_path / "two"), *given)
    launch = [
        *TORCHRUN,
        "--nnodes",
        "2",
        "--master-addr",
        "127.0.0.1",
        "--master-port",
        port,
        "--nproc-per-node",
        "1",
    ]
    nodes = [
        started(*two, launcher=[*launch, "--node-rank", rank, "-m", "qarl"]) for rank in ("0", "1")
    ]
    for node in nodes:
        printed, _ = node.communicate(timeout=400)
        assert node.returncode == 0, printed
    whole = lines(tmp_path / "one")
    assert len(whole) == 2
    assert lines(tmp_path / "two") == whole


@pytest.mark.slow
@pytest.mark.skipif(
    not thorough(),
    reason="three launches and two servers are minutes of CPU; `make test-thorough` makes them",
)
def test_two_machines_lose_one_side_and_then_the_other(tmp_path: Path):
    """Check a run whose first machine learns and whose second one samples and learns: a process of
    torchrun on each, a server on the second. The first machine dies by SIGKILL; what is left of the
    second's learner stops. Then the server dies and is started again, and torchrun resumes the run
    on both machines. Every metric and digest is that of two processes on one machine with engines
    of their own, without faults.

    Blind spots: machines share the file system, and the network loses nothing.
    """
    key = tmp_path / "key"
    key.write_text("key-of-two-machines")
    key.chmod(0o600)
    options = ("--scheme", "w8a8", "--steps", "4", *SHORT)
    options += ("--max-new-tokens", "8", "--checkpoint-every", "1", "--sync.canary_every", "1")
    alone = ("--processes", "2", "--output", str(tmp_path / "alone"))
    one = started("train", *alone, *options)
    printed, _ = one.communicate(timeout=500)
    assert one.returncode == 0, printed
    run = tmp_path / "run"
    with two_machines() as (first, second):
        url = f"http://{second.address}:8100"
        serve = command("serve-rollouts", *options, "--replicas", "1", "--host", second.address)
        serve += ["--key-file", str(key)]
        served = ("--rollout.servers", url, "--rollout.server_key_file", str(key))
        served += ("--rollout.server_transfer", "http")

        def start_server() -> "subprocess.Popen[bytes]":
            log = tmp_path / f"server-{len(list(tmp_path.glob('server-*')))}"
            process = second.start(serve, log)
            wait_for_text(log, "ready (with the key)", process)
            return process

        def learn(arguments: list[str], log: str) -> list["subprocess.Popen[bytes]"]:
            launch = [*TORCHRUN, "--nnodes", "2", "--nproc-per-node", "1"]
            launch += ["--master-addr", first.address, "--master-port", "29571"]
            return [
                machine.start(
                    [*launch, "--node-rank", str(rank), "-m", "qarl", *arguments],
                    tmp_path / f"{log}-{rank}",
                )
                for rank, machine in enumerate((first, second))
            ]

        server = start_server()
        _, other = learn(["train", *options, *served, "--output", str(run)], "learner")
        wait_for_checkpoint(run, other)
        first.kill()
        assert other.wait(120) != 0
        kill_tree(server)
        server = start_server()
        nodes = learn(["train", "--resume", str(run)], "resumed")
        for rank, node in enumerate(nodes):
            assert node.wait(400) == 0, (tmp_path / f"resumed-{rank}").read_text()
    assert lines(run) == lines(tmp_path / "alone")
    assert len(lines(run)) == 4


@pytest.mark.slow
@pytest.mark.skipif(
    not thorough(),
    reason="two servers are a minute of CPU; `make test-thorough` starts them",
)
@pytest.mark.parametrize(("scheme", "transfer"), [("w4a16", "files"), ("w8a8", "http")])
def test_a_run_on_two_servers_is_the_run_in_process(
    scheme: str, transfer: str, random_policy, tmp_path: Path
):
    """Check equality to the last bit of metrics except seconds, digests and held-out accuracy.

    The output head is quantized, because an unquantized one rounds otherwise if four sequences or
    fewer are decoded at once, and two servers reach that sooner than one engine
    (docs/guide/servers.md).
    """
    options = [
        "--model",
        str(random_policy(False)),
        "--scheme",
        scheme,
        "--layers",
        "lm_head=w8a8",
        "--task",
        "chain_sum",
        "--reward",
        "tests.support.rewards:reward",
        "--rollout.max_prompt_tokens",
        "64",
        "--max-new-tokens",
        "8",
        "--learner.micro_batch_tokens",
        "512",
        "--export",
        "false",
        "--sync.canary_every",
        "1",
    ]
    served = ("--rollout.servers", "2", "--rollout.server_transfer", transfer)
    for name, servers in (("inside", ()), ("outside", served)):
        succeeded("train", *SMALL, *options, *servers, "--output", tmp_path / name)
    inside = lines(tmp_path / "inside")
    assert lines(tmp_path / "outside") == inside
    assert inside[-1]["weight_version"] == 4, "every step learned"


@pytest.mark.slow
@pytest.mark.skipif(
    not thorough(),
    reason="two servers and a dozen runs are minutes; `make test-thorough` makes them",
)
@pytest.mark.parametrize("fault", ["cut after", "disk full", "second learner"])
def test_a_run_with_a_fault_is_the_run_without(fault: str):
    """Check that the run continues, or stops with a line and is resumed.

    Metrics and digests are those of a run without servers.
    """
    command = [
        sys.executable,
        "scripts/server_faults.py",
        "--runs",
        "100",
        "--only",
        fault,
    ]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
