"""`qarl train` on servers equals `qarl train` alone, also with a fault (`scripts/server_faults.py` makes more)."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import Policies
from tests.support.profiles import thorough
from tests.support.runs import ROOT, SMALL, environment, lines, succeeded


@pytest.mark.slow
@pytest.mark.skipif(not thorough(), reason="two servers are a minute of CPU; `make test-thorough` starts them")
@pytest.mark.parametrize(("scheme", "transfer"), [("w4a16", "files"), ("w8a8", "http")])
def test_a_run_on_two_servers_is_the_run_in_process(
    scheme: str, transfer: str, random_policy: Policies, tmp_path: Path
):
    """Contract: metrics except seconds, digests of every version, and held-out accuracy are equal to the last bit. The
    output head is quantized: an unquantized one rounds otherwise where four sequences or fewer are decoded at once, and
    two servers come to that sooner than one engine (docs/guide/servers.md)."""
    options = [
        "--model", str(random_policy(False)), "--scheme", scheme, "--layers", "lm_head=w8a8", "--task", "chain_sum",
        "--reward", "tests.support.rewards:reward", "--rollout.max_prompt_tokens", "64", "--max-new-tokens", "8",
        "--learner.micro_batch_tokens", "512", "--export", "false", "--sync.canary_every", "1",
    ]  # fmt: skip
    served = ("--rollout.servers", "2", "--rollout.server_transfer", transfer)
    for name, servers in (("inside", ()), ("outside", served)):
        succeeded("train", *SMALL, *options, *servers, "--output", tmp_path / name)
    inside = lines(tmp_path / "inside")
    assert lines(tmp_path / "outside") == inside
    assert inside[-1]["weight_version"] == 4, "every step learned"


@pytest.mark.slow
@pytest.mark.skipif(not thorough(), reason="two servers and a dozen runs are minutes; `make test-thorough` makes them")
@pytest.mark.parametrize("fault", ["cut after", "disk full", "second learner"])
def test_a_run_with_a_fault_is_the_run_without(fault: str):
    """Contract: it goes on, or stops with a line and is resumed; metrics and digests are those of a run in process."""
    command = [sys.executable, "scripts/server_faults.py", "--runs", "100", "--only", fault]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
