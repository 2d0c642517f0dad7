"""Attention by the engine's kernel: its values, its gradients, and that sequences stay apart. That it gives the
engine's bits is held where an engine runs (tests/engine/test_publish.py)."""

import pytest
import torch

from qarl.quant.kernels import cpu_attention as kernel
from qarl.quant.operators.attention import attention, torch_attention, uses_cpu_kernel
from qarl.quant.operators.packing import Sequences, pack

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA build of vLLM has no CPU kernels")

LENGTHS = [1, 33, 7, 64, 7, 7]
APART = Sequences.apart(LENGTHS)


Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def inputs(dtype: torch.dtype, head: int = 32) -> Rows:
    """q of four heads, k and v of two, of all sequences in one row."""
    generator = torch.Generator().manual_seed(0)

    def drawn(heads: int) -> torch.Tensor:
        return torch.randn(1, sum(LENGTHS), heads, head, generator=generator).to(dtype).requires_grad_()

    return drawn(4), drawn(2), drawn(2)


def by_torch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None) -> torch.Tensor:
    return torch_attention(q[0], k[0], v[0], scale, APART, window)[None]


@pytest.mark.parametrize("window", [None, 7, 40])
@pytest.mark.parametrize("head", [32, 80, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_values_and_gradients_are_those_of_torchs_attention(dtype: torch.dtype, head: int, window: int | None):
    """Both compute in fp32 and round once, vLLM's with an exponential good to 1e-5; gradients are torch's, of the same
    inputs."""
    ours, theirs = inputs(dtype, head), inputs(dtype, head)
    y, expected = attention(*ours, 0.3, APART, "vllm", window), by_torch(*theirs, 0.3, window)
    bound = max(4 * torch.finfo(dtype).eps, 2e-5)
    torch.testing.assert_close(y, expected, rtol=bound, atol=bound)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    y.backward(dy)
    expected.backward(dy)
    for a, b in zip(ours, theirs, strict=True):
        assert a.grad is not None and torch.equal(a.grad, b.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("window", [1, 7])
def test_a_token_sees_its_window_alone(window: int):
    """Contract: what lies before it changes no bit, and the first of it does."""
    q, k, v = (t.detach()[:, :64] for t in inputs(torch.bfloat16))
    whole = attention(q, k, v, 0.3, kernel="vllm", window=window)
    moved = torch.arange(64)[None, :, None, None] < 20
    changed = attention(q, torch.where(moved, -k, k), torch.where(moved, -v, v), 0.3, kernel="vllm", window=window)
    same = (whole == changed).flatten(2).all(-1)[0]
    assert same.tolist() == [n >= 20 + window - 1 for n in range(64)]


@pytest.mark.parametrize("window", [None, 7])
def test_sequences_packed_together_are_as_each_alone_to_the_bit(window: int | None):
    q, k, v = (t.detach() for t in inputs(torch.bfloat16))
    together = attention(q, k, v, 0.3, APART, "vllm", window)
    rows = zip(*(t.split(LENGTHS, dim=1) for t in (q, k, v)), strict=True)
    alone = [attention(q_, k_, v_, 0.3, kernel="vllm", window=window)[0] for q_, k_, v_ in rows]
    assert torch.equal(together[0], torch.cat(alone))


@pytest.mark.parametrize("window", [None, 7])
def test_a_token_does_not_depend_on_what_follows_to_the_bit(window: int | None):
    """So decoding gives what scoring the whole sequence does."""
    q, k, v = (t.detach()[:, :64] for t in inputs(torch.bfloat16))
    whole = attention(q, k, v, 0.3, kernel="vllm", window=window)
    for n in (1, 31, 32, 33, 63):
        assert torch.equal(attention(q[:, :n], k[:, :n], v[:, :n], 0.3, kernel="vllm", window=window), whole[:, :n])


@pytest.mark.parametrize("window", [None, 7, 40])
@pytest.mark.parametrize("kernel", ["vllm", "reference"])
def test_a_prompt_that_several_see_is_as_if_each_brought_it(kernel: str, window: int | None):
    """Contract: a response's attention over the first sequence's prompt has the bits of a whole sequence's; a prompt's
    gradient is the sum of all that see it, to fp32's rounding."""
    whole = torch.tensor([40, 9, 37, 38])  # the third is another group's, and shares nothing
    shared, leader = torch.tensor([0, 7, 0, 33]), torch.tensor([0, 0, 2, 2])
    packed = pack(whole, 40, shared, leader)
    row = packed.sequences
    assert (row.lengths, row.seen) == ((40, 2, 37, 5), (40, 9, 37, 38))
    assert row.positions(torch.device("cpu"))[40:42].tolist() == [7, 8]
    tokens = sum(row.lengths)
    q, k, v = once = [t.detach()[:, :tokens].requires_grad_() for t in inputs(torch.float32)]
    real = torch.arange(40) < whole[:, None]
    q_, k_, v_ = each = [t.detach()[:, packed.places[real]].requires_grad_() for t in once]
    apart = Sequences.apart(whole.tolist())
    y, expected = attention(q, k, v, 0.3, row, kernel, window), attention(q_, k_, v_, 0.3, apart, kernel, window)
    own = packed.kept[real]
    bound = 0 if kernel == "vllm" else 1e-6
    torch.testing.assert_close(y, expected[:, own], rtol=bound, atol=bound)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    y.backward(dy)
    expected.backward(torch.zeros_like(expected).index_copy_(1, own.nonzero().flatten(), dy))
    for a, b in zip(once, each, strict=True):
        summed = torch.zeros_like(a).index_add_(1, packed.places[real], b.grad)  # type: ignore[arg-type]
        torch.testing.assert_close(a.grad, summed, rtol=1e-5, atol=1e-5)


def test_the_size_of_a_page_changes_no_bit(monkeypatch: pytest.MonkeyPatch):
    """The engine's pages are larger."""
    q, k, v = inputs(torch.bfloat16)
    small = attention(q, k, v, 0.3, APART, "vllm")
    monkeypatch.setattr(kernel, "_BLOCK", 128)
    assert torch.equal(attention(q, k, v, 0.3, APART, "vllm"), small)


def test_other_families_devices_and_heads_take_torchs():
    assert uses_cpu_kernel("auto", "cpu", 64)
    assert not any(
        uses_cpu_kernel(*case) for case in [("reference", "cpu", 64), ("auto", "cuda", 64), ("auto", "cpu", 24)]
    )
