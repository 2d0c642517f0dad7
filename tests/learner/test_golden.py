"""Short runs of the learner against a replay in plain PyTorch.

The replay has its own forward (transformers' model, padded, fp32), its own formulas of objectives,
corrections and aggregations, its own AdamW and its own statistics. It shares with the product the
quantized codes, the cut of a batch into mini-batches and `measure_mismatch`. Other tests compare
these: tests/quant/test_materialize.py and test_learner_parts.py.

Each run learns two batches whose sampler is off by up to 1 nat. Blind spot: what needs more than
two batches, Muon (test_optim.py), quantized activations (tests/quant/test_linear.py) and a real
engine (tests/engine).
"""

import copy
import dataclasses
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from qarl.configs.seeds import step_seed
from qarl.learner.batching import Batch, mini_batches
from qarl.learner.clip_reasons import CLIP_REASONS
from qarl.learner.diagnostics.token_log import TokenLog
from qarl.learner.learn_stats import LearnStats
from qarl.learner.mismatch import measure_mismatch
from tests.support.learners import batch_of, make_learner, random_model
from tests.support.models import low_bit

BETAS = (0.9, 0.95)
"""AdamW's defaults in `OptimizerConfig`."""
EPSILON = 1e-8
"""AdamW's, as in torch."""
LOGGED = [1, 5]
"""Rows that the log is asked to show, so it has their log-probs under unquantized weights."""


def response_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean over each response's tokens, [B, 1]."""
    total = (values * mask).sum(-1, keepdim=True)
    return total / mask.sum(-1, keepdim=True)


@dataclasses.dataclass
class Terms:
    """Log-probs of a mini-batch, fp32 [B, T-1], with what its loss needs."""

    current: Tensor
    old: Tensor
    sampler: Tensor
    mask: Tensor
    advantages: Tensor

    @property
    def token_ratio(self) -> Tensor:
        """r_t = π_cur / π_old, [B, T-1]."""
        return (self.current - self.old).exp()

    @property
    def sequence_ratio(self) -> Tensor:
        """s = exp(mean_t log r_t), [B, 1]."""
        return response_mean(self.current - self.old, self.mask).exp()

    @property
    def log_weight(self) -> Tensor:
        """log w_t = log π_old - log π_sampler, [B, T-1]."""
        return (self.old - self.sampler) * self.mask


@dataclasses.dataclass
class Loss:
    """Loss of each token, and whether its ratio and its weight were cut, [B, T-1]."""

    tokens: Tensor
    clipped: Tensor
    corrected: Tensor
    per_sequence: bool = False
    """True if the ratio is one of the whole sequence."""


def clip_surrogate(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """Return min(r A, clip(r, 1 - low, 1 + high) A)."""
    return torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)


def beyond(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """Return where the surrogate is flat: above 1 + high if A > 0, below 1 - low if A < 0."""
    above = (ratio > 1 + high) & (advantages > 0)
    below = (ratio < 1 - low) & (advantages < 0)
    return above | below


def geometric(terms: Terms) -> tuple[Tensor, Tensor]:
    """Return clip(exp(mean_t log w_t), 1/2, 2) and where it is cut."""
    exact = response_mean(terms.log_weight, terms.mask).exp()
    weight = exact.clamp(0.5, 2.0)
    return weight, weight != exact


def tbpo(terms: Terms) -> Loss:
    """QaRL: -w̃ · clip(s) · A, with bounds [0, 1 + 4e-4] if A ≥ 0 and [1 - 3e-4, 1 + 7e-4] else."""
    weight, cut = geometric(terms)
    positive = terms.advantages >= 0
    low = torch.where(positive, 0.0, 1 - 3e-4)
    high = torch.where(positive, 1 + 4e-4, 1 + 7e-4)
    ratio = terms.sequence_ratio.expand_as(low)
    clipped = (ratio < low) | (ratio > high)
    banded = torch.minimum(torch.maximum(ratio, low), high)
    loss = -weight * banded * terms.advantages
    return Loss(loss, clipped, cut.expand_as(clipped), per_sequence=True)


def grpo(terms: Terms) -> Loss:
    """GRPO with bounds 0.99 and 1.02; w_t masked outside [0.5, 5] (token_mis)."""
    exact = terms.log_weight.exp()
    inside = (exact >= 0.5) & (exact <= 5.0)
    surrogate = clip_surrogate(terms.token_ratio, terms.advantages, 0.01, 0.02)
    clipped = beyond(terms.token_ratio, terms.advantages, 0.01, 0.02)
    return Loss(-torch.where(inside, exact, 0.0) * surrogate, clipped, ~inside)


def gspo(terms: Terms) -> Loss:
    """GSPO with its default bounds; the sequence's w masked above 2 (sequence_mis)."""
    exact = terms.log_weight.sum(-1, keepdim=True).exp()
    inside = exact <= 2.0
    ratio = terms.sequence_ratio
    surrogate = clip_surrogate(ratio, terms.advantages, 3e-4, 4e-4)
    clipped = beyond(ratio, terms.advantages, 3e-4, 4e-4)
    loss = -torch.where(inside, exact, 0.0) * surrogate
    return Loss(loss, clipped, (~inside).expand_as(clipped), per_sequence=True)


def sapo(terms: Terms) -> Loss:
    """SAPO: 4/τ · σ(τ (r - 1)) with τ = 1 if A > 0 and 1.05 else; geometric w̃; never clipped."""
    weight, cut = geometric(terms)
    tau = torch.where(terms.advantages > 0, 1.0, 1.05)
    gate = 4 / tau * torch.sigmoid(tau * (terms.token_ratio - 1))
    loss = -weight * gate * terms.advantages
    return Loss(loss, torch.zeros_like(terms.mask), cut.expand_as(terms.mask))


def seq_mean_token_mean(values: Tensor, mask: Tensor) -> Tensor:
    return response_mean(values, mask).mean()


def token_mean(values: Tensor, mask: Tensor) -> Tensor:
    return (values * mask).sum() / mask.sum()


def seq_sum(values: Tensor, mask: Tensor) -> Tensor:
    return (values * mask).sum(-1).mean()


@dataclasses.dataclass
class Run:
    """Configuration of a run, for the product and for the replay."""

    objective: Callable[[Terms], Loss]
    learner: dict[str, Any]
    """The learner's configuration without its optimizer."""
    aggregate: Callable[[Tensor, Tensor], Tensor] = seq_mean_token_mean
    scheme: str = "bf16"
    lr: float = 1e-3
    weight_decay: float = 0.01
    grad_clip: float = 1.0
    warmup_steps: int = 0
    kl: float = 0.0
    """Coefficient of the k3 penalty."""

    def optimizer(self) -> dict[str, Any]:
        names = ("lr", "weight_decay", "grad_clip", "warmup_steps")
        return {"name": "adamw"} | {name: getattr(self, name) for name in names}


RUNS = {
    "tbpo with a penalty": Run(
        tbpo,
        {"mini_batches": 2, "kl": {"name": "k3", "coefficient": 0.3}},
        weight_decay=0.1,
        grad_clip=0.5,
        warmup_steps=3,
        kl=0.3,
    ),
    "grpo with masked weights": Run(
        grpo,
        {
            "mini_batches": 2,
            "objective": {"name": "grpo", "clip_low": 0.01, "clip_high": 0.02},
            "correction": {"name": "token_mis"},
            "aggregation": {"name": "seq-sum"},
        },
        seq_sum,
    ),
    "gspo in small micro-batches": Run(
        gspo,
        {
            "mini_batches": 3,
            "micro_batch_tokens": 40,
            "objective": {"name": "gspo"},
            "correction": {"name": "sequence_mis"},
        },
    ),
    "sapo with a shadow forward": Run(
        sapo,
        {
            "mini_batches": 2,
            "objective": {"name": "sapo"},
            "correction": {"name": "geometric"},
            "aggregation": {"name": "token-mean"},
            "ratio_fix": "shadow_forward",
            "aligned": False,
        },
        token_mean,
        lr=3e-4,
    ),
    "grpo over 4-bit codes": Run(
        grpo,
        {
            "mini_batches": 1,
            "objective": {"name": "grpo", "clip_low": 0.01, "clip_high": 0.02},
            "correction": {"name": "token_mis"},
        },
        scheme="w4a16",
        lr=2e-5,
    ),
}


class Replay:
    """A learner with nothing but transformers' model and the formulas above."""

    def __init__(self, run: Run):
        self.run = run
        self.masters = random_model()
        """Masters, fp32."""
        self.policy = self.quantized()
        self.start = copy.deepcopy(self.policy)
        zeros = {n: torch.zeros_like(p) for n, p in self.masters.named_parameters()}
        self.first_moments = zeros
        self.second_moments = {name: moment.clone() for name, moment in zeros.items()}
        self.steps = 0
        self.lr = run.lr
        """Learning rate of the present batch."""

    def quantized(self) -> Any:
        """Return a copy of the masters with the values of the scheme's codes as linear weights."""
        policy = copy.deepcopy(self.masters)
        if self.run.scheme == "bf16":
            return policy
        coded = low_bit(copy.deepcopy(self.masters), self.run.scheme, torch.float32)
        for name, linear in coded.linears.items():
            weight = policy.get_parameter(f"{name}.weight")
            weight.data = linear.codes().dequantized(torch.float32)
        return policy

    @staticmethod
    def forward(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return log-probs and entropies of the response tokens, fp32 [B, T-1]."""
        logits = model(input_ids=batch.tokens).logits.float()
        logp = logits.log_softmax(-1)[:, :-1]
        picked = logp.gather(-1, batch.tokens[:, 1:, None])[..., 0]
        entropy = -(logp.exp() * logp).sum(-1)
        return picked * batch.response_mask, entropy * batch.response_mask

    def learn(self, batch: Batch, step: int) -> dict[str, Any]:
        """Learn a batch. Return its statistics and what the log shall hold."""
        warmed_up = (step + 1) / max(self.run.warmup_steps, 1)
        self.lr = self.run.lr * min(1.0, warmed_up)
        with torch.no_grad():
            old, entropy = self.forward(self.policy, batch)
            reference, _ = self.forward(self.start, batch)
            unquantized, _ = self.forward(self.masters, batch)
        cut = mini_batches(batch, self.run.learner["mini_batches"], step_seed(0, step))
        trained = [rows for rows in cut if batch.advantages[rows].any()]
        log: dict[str, Any] = {
            "old": old,
            "log_ratio": torch.zeros_like(old),
            "reasons": Counter[str](),
            "unquantized": unquantized,
        }
        updates = [self.update(batch, rows, old, reference, log) for rows in trained]
        means = {
            name: sum(update[name] for update in updates) / len(updates) for name in updates[0]
        }
        return {
            **means,
            "update_log_ratio": updates[-1]["update_log_ratio"],
            "lr": self.lr,
            "updates": len(updates),
            "entropy": float(entropy.sum() / batch.response_mask.sum()),
            "log": log,
        }

    def update(
        self, batch: Batch, rows: Tensor, old: Tensor, reference: Tensor, log: dict[str, Any]
    ) -> dict[str, float]:
        """Descend one mini-batch's loss. Return its statistics."""
        some = batch.rows(rows)
        length = some.response_mask.shape[1]
        self.policy.zero_grad()
        current, _ = self.forward(self.policy, some)
        terms = Terms(
            current=current,
            old=old[rows][:, :length],
            sampler=some.sampler_logprobs,
            mask=some.response_mask,
            advantages=some.advantages,
        )
        found = self.run.objective(terms)
        d = (reference[rows][:, :length] - current) * terms.mask
        k3 = d.expm1() - d
        penalty = self.run.kl * self.run.aggregate(k3, terms.mask)
        loss = self.run.aggregate(found.tokens, terms.mask) + penalty
        loss.backward()
        norm = self.step()
        log_ratio = (current.detach() - terms.old) * terms.mask
        log["log_ratio"][rows, :length] = log_ratio
        reasons = clip_reasons(found, terms, log_ratio)
        log["reasons"].update(reasons.values())

        def share(values: Tensor) -> float:
            return float(response_mean(values.float(), terms.mask).mean())

        def share_of_side(side: str) -> float:
            clipped = torch.zeros_like(terms.mask)
            for place, reason in reasons.items():
                clipped[place] = reason.endswith(side)
            return share(clipped)

        return {
            "loss": float(loss.detach()),
            "clipped": share(found.clipped),
            "clipped_positive_above": share_of_side("A > 0 above"),
            "clipped_negative_above": share_of_side("A < 0 above"),
            "clipped_negative_below": share_of_side("A < 0 below"),
            "corrected": share(found.corrected),
            "ratio_mean": share(log_ratio.exp()),
            "update_log_ratio": float(response_mean(log_ratio, terms.mask).abs().mean()),
            "kl": share(k3.detach()) if self.run.kl else 0.0,
            "grad_norm": norm,
        }

    def step(self) -> float:
        """Step the masters by AdamW with the policy's gradients. Return the gradients' norm.

        The gradient passes straight through the quantization: a weight's is its master's.
        """
        gradients = {n: p.grad for n, p in self.policy.named_parameters() if p.grad is not None}
        squares = [float(g.double().square().sum()) for g in gradients.values()]
        norm = math.sqrt(sum(squares))
        factor = min(1.0, self.run.grad_clip / (norm + 1e-6))
        self.steps += 1
        for name, gradient in gradients.items():
            master = self.masters.get_parameter(name).data
            m = self.first_moments[name]
            v = self.second_moments[name]
            g = gradient * factor
            m.mul_(BETAS[0]).add_((1 - BETAS[0]) * g)
            v.mul_(BETAS[1]).add_((1 - BETAS[1]) * g.square())
            m_hat = m / (1 - BETAS[0] ** self.steps)
            v_hat = v / (1 - BETAS[1] ** self.steps)
            master.mul_(1 - self.lr * self.run.weight_decay)
            master.sub_(self.lr * m_hat / (v_hat.sqrt() + EPSILON))
        self.policy = self.quantized()
        return norm


def clip_reasons(
    loss: Loss,
    terms: Terms,
    log_ratio: Tensor,
) -> dict[tuple[int, int], str]:
    """Return (sequence, position) → reason of each response token, as `CLIP_REASONS` names it."""
    moved = response_mean(log_ratio, terms.mask) if loss.per_sequence else log_ratio
    moved = moved.expand_as(log_ratio)
    reasons: dict[tuple[int, int], str] = {}
    for place in terms.mask.nonzero():
        b, t = place.tolist()
        advantage = float(terms.advantages[b, t])
        if loss.clipped[b, t] and advantage != 0:
            of = "sequence, " if loss.per_sequence else ""
            sign = ">" if advantage > 0 else "<"
            side = "above" if moved[b, t] > 0 else "below"
            reasons[b, t] = f"{of}A {sign} 0 {side}"
        else:
            reasons[b, t] = "corrected" if loss.corrected[b, t] else "none"
    return reasons


def with_noisy_sampler(batch: Batch, replay: Replay) -> Batch:
    """Return the batch with the policy's own log-probs plus noise of up to 1 nat as sampler's."""
    with torch.no_grad():
        own, _ = replay.forward(replay.policy, batch)
    noise = torch.sin(torch.arange(own.numel()) * 1.7).view(own.shape)
    return dataclasses.replace(batch, sampler_logprobs=own + noise * batch.response_mask)


def assert_statistics(found: LearnStats, expected: dict[str, Any]) -> None:
    """Assert that the statistics are the replay's. Only the order of sums differs."""
    names = [name for name in expected if name != "log"]
    ours = {name: getattr(found, name) for name in names}
    assert ours == pytest.approx({name: expected[name] for name in names}, rel=5e-3, abs=1e-5)
    assert found.skipped == 0
    assert found.load_balance == 0.0
    assert found.phantom_clipped == 0.0
    assert found.loss_scale == 1.0


def assert_logged(
    log: TokenLog,
    batch: Batch,
    expected: dict[str, Any],
    aligned: bool,
) -> None:
    """Assert that the log has the replay's numbers. Only an aligned learner scores its unquantized
    weights.
    """
    torch.testing.assert_close(log.old, expected["old"], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(log.log_ratio, expected["log_ratio"], rtol=1e-2, atol=1e-3)
    assert log.known.all()
    reasons = log.clip[batch.response_mask & log.updated[:, None]]
    assert Counter(CLIP_REASONS[place] for place in reasons) == expected["reasons"]
    scored = log.unquantized.known.nonzero().flatten().tolist()
    assert scored == (LOGGED if aligned else [])
    torch.testing.assert_close(
        log.unquantized.values[scored],
        expected["unquantized"][scored],
        rtol=1e-3,
        atol=1e-3,
    )


@pytest.mark.parametrize("name", RUNS)
def test_two_batches_are_learned_as_by_the_formulas(name: str):
    """Contract: every statistic and the log of the tokens are the replay's, also in the second
    batch, which the stepped masters of the first one score.
    """
    run = RUNS[name]
    replay = Replay(run)
    reference = low_bit(random_model(), run.scheme, torch.float32) if run.kl else None
    learner = make_learner(
        run.scheme,
        torch.float32,
        reference=reference,
        optimizer=run.optimizer(),
        diagnostics_every=1,
        **run.learner,
    )
    for step in range(2):
        batch = with_noisy_sampler(batch_of(step), replay)
        expected = replay.learn(batch, step)
        log = TokenLog(batch, LOGGED)
        found = learner.learn(batch, step, log=log)
        assert_statistics(found, expected)
        assert_logged(log, batch, expected["log"], run.learner.get("aligned", True))
        mismatch = measure_mismatch(
            expected["log"]["old"],
            batch.sampler_logprobs,
            batch.response_mask,
            batch.advantages,
            batch.ended,
        )
        assert vars(found.mismatch) == pytest.approx(vars(mismatch), rel=5e-3, abs=1e-3)
