"""Tests of masters of which each process holds some rows.

They are materialized and stepped as whole ones are, bit for bit, by processes over gloo
(`tests/support/shard_worker.py`). `test_two_processes.py` has whole trainings.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from qarl.quant.runtime.shards import cut_rows
from tests.support.runs import run_workers
from tests.support.shard_worker import ROWS, gradient_of, row_steps
from tests.support.tensors import normal


@pytest.fixture(scope="module")
def worker_results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the tensors that two processes computed from their rows."""
    folder = tmp_path_factory.mktemp("sharded")
    run_workers("shard_worker", folder / "worker_results.pt", folder / "log.txt")
    return torch.load(folder / "worker_results.pt")


@pytest.mark.parametrize("name", ROWS)
def test_masters_cut_into_rows_step_as_whole_masters(
    worker_results: dict[str, Any], name: str, tmp_path: Path
):
    """Contract: with equal gradients, three steps equal those of one process, bit for bit: AdamW,
    Muon over matrices cut between processes and over experts, 16-bit masters rounded to nearest.
    Between steps the state goes through a checkpoint, whose moments are those of one process.
    """
    theirs, their_state = row_steps(name, tmp_path)
    ours, our_state = worker_results[name]
    for key, master in theirs.items():
        assert not torch.equal(gradient_of(key, 0).to(master.dtype), master.detach())
        assert torch.equal(ours[key], master.detach())
        mine, other = (state["moments"][key] for state in (our_state, their_state))
        assert mine.keys() == other.keys() != set()
        assert all(torch.equal(mine[k], other[k]) for k in mine)


def test_masters_cut_into_rows_are_materialized_as_whole_masters(worker_results: dict[str, Any]):
    """Contract: codes and scales agree for every scheme, matrices and experts, including
    tensor-wide and kept scales and a process without any row.
    """
    assert len(worker_results["equal"]) > 30
    assert [name for name, equal in worker_results["equal"].items() if not equal] == []


def test_gradients_sent_in_16_bits_are_rounded_once_and_added_up_in_fp32(
    worker_results: dict[str, Any],
):
    """Contract: a process's own part is not rounded; by default no part is."""
    whole = [normal(5, 24, seed=rank) for rank in range(2)]
    for rank, (exact, rounded) in enumerate(worker_results["sums"]):
        edges = cut_rows(whole[0].shape, rank, 2).edges
        mine = whole[rank][edges[rank] : edges[rank + 1]]
        theirs = whole[1 - rank][edges[rank] : edges[rank + 1]]
        assert torch.equal(exact, mine + theirs)
        assert torch.equal(rounded, mine + theirs.to(torch.bfloat16).to(torch.float32))
        assert not torch.equal(exact, rounded)


@pytest.mark.parametrize(("rows", "world"), [(1, 2), (7, 3), (384, 2), (64, 8), (9, 8)])
def test_every_row_belongs_to_one_process(rows: int, world: int):
    """Contract: parts are consecutive, and those that `torch.chunk` makes, as for a DTensor."""
    whole = torch.arange(rows)
    parts = [cut_rows(whole.shape, rank, world).rows(whole) for rank in range(world)]
    assert torch.equal(torch.cat(parts), whole)
    chunks = whole.chunk(world)
    assert [part.tolist() for part in parts[: len(chunks)]] == [c.tolist() for c in chunks]
