"""Runs on servers, each with a fault: see `scripts/server_faults.py`, which this makes some of."""

import subprocess
import sys

import pytest

from tests.support.profiles import thorough
from tests.support.runs import ROOT, environment


@pytest.mark.slow
@pytest.mark.skipif(not thorough(), reason="two servers and a dozen runs are minutes; `make test-thorough` makes them")
@pytest.mark.parametrize("fault", ["cut after", "disk full", "second learner"])
def test_a_run_with_a_fault_is_the_run_without(fault: str):
    """Contract: it goes on, or stops with a line and is resumed; metrics and digests are those of a run in process."""
    command = [sys.executable, "scripts/server_faults.py", "--runs", "100", "--only", fault]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
