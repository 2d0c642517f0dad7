"""A policy for any training loop. It is called like a transformers model, and computes with the
low-bit tensors that its engine samples from.

Axes: B rows, T tokens of a row, of which T-1 are predicted, V vocabulary.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys
from transformers import AutoTokenizer
from transformers.modeling_outputs import CausalLMOutput

from qarl.configs.errors import PolicyError
from qarl.configs.schema.run import RunConfig
from qarl.configs.words import quoted
from qarl.learner.batching import Batch
from qarl.learner.gradients import configure_backward
from qarl.learner.learner import FirstBatchGate
from qarl.learner.logprobs import token_logprobs
from qarl.learner.mismatch import Mismatch, measure_mismatch
from qarl.learner.optim.loss_scale import require_finite_scores
from qarl.learner.processes import Processes
from qarl.learner.scorer import Scorer
from qarl.quant.graph.packing import Packed, Sequences, known, prefilled_tokens
from qarl.quant.model.low_bit_model import LowBitModel
from qarl.quant.types import LowBitTensor
from qarl.sync.export import export_checkpoint
from qarl.sync.floor import OTHER_ROUNDINGS_SEED
from qarl.sync.publisher import Publish


@dataclass(frozen=True)
class TokenRows:
    """Rows of tokens, each with one sequence or several."""

    tokens: torch.Tensor
    """int64 [B, T]."""
    real: torch.Tensor
    """bool [B, T], true for tokens that belong to a sequence."""
    lengths: tuple[int, ...]
    """Numbers of tokens of the sequences, in row-major order."""
    predicted: torch.Tensor
    """bool [B, T-1], true where the row's next token is of the same sequence."""

    def packed(self, sampled: torch.Tensor | None = None) -> Packed:
        """Return the layout for a forward over all sequences in one row.

        sampled: bool [B, T-1], positions whose next token the engine sampled. None: unknown.
        """
        positions = self.real.flatten().cumsum(0).view(self.real.shape) - 1
        sequences = Sequences.apart(self.lengths)
        if sampled is not None:
            length = torch.tensor(self.lengths, device=self.real.device)
            mask = self.padded(nn.functional.pad(sampled, (0, 1)))[:, :-1]
            prefilled = known(prefilled_tokens(mask, length).tolist())
            sequences = replace(sequences, prefilled=prefilled)
        return Packed(self.real, positions.where(self.real, 0), sequences)

    def padded(self, values: torch.Tensor) -> torch.Tensor:
        """Return values of tokens, [B, T], as one sequence a row, zero-padded on the right."""
        return nn.utils.rnn.pad_sequence(
            list(values[self.real].split(self.lengths)), batch_first=True
        )


def token_rows(
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    vocabulary: int,
) -> TokenRows:
    """Find the sequences in rows of tokens; for the arguments see `Policy.forward`.

    Raises `PolicyError` for tensors that contradict each other.
    """
    if attention_mask is None:
        real = torch.ones_like(input_ids, dtype=torch.bool)
    else:
        real = attention_mask.bool()
    if cu_seqlens is not None:
        apart = Sequences.apart(cu_seqlens.diff().tolist())
        counted = apart.positions(input_ids.device)[None]
        if cu_seqlens[0] != 0 or (
            position_ids is not None and position_ids.tolist() != counted.tolist()
        ):
            raise PolicyError(
                f"cu_seqlens {quoted(cu_seqlens.tolist())} must begin with 0 and agree with"
                " position_ids"
            )
        position_ids = counted
    positions = real.cumsum(-1) - 1 if position_ids is None else position_ids
    if input_ids.ndim != 2 or not input_ids.shape == real.shape == positions.shape:
        sides = (input_ids, real, positions)
        shapes = ", ".join(str(list(tensor.shape)) for tensor in sides)
        raise PolicyError(
            f"input_ids, attention_mask and positions are {shapes}; give each as [B, T]"
        )
    flat = positions[real]
    tokens = input_ids[real]
    # a sequence begins at each position 0
    begins = (flat == 0).nonzero().flatten()
    bounds = [*begins.tolist(), len(flat)]
    lengths = torch.tensor(bounds).diff().tolist()
    if not len(flat) or tokens.min() < 0 or tokens.max() >= vocabulary:
        raise PolicyError(
            f"input_ids must hold a token, and ids from 0 to {vocabulary - 1} alone, not"
            f" {quoted(tokens.tolist())}"
        )
    if (
        not torch.equal(flat, Sequences.apart(lengths).positions(flat.device))
        or (positions * real)[:, 0].any()
    ):
        raise PolicyError(
            f"position_ids {quoted(flat.tolist())} must count each sequence's tokens from 0 one by"
            " one (cu_seqlens: from 0 to the tokens of one row), and begin anew in every row;"
            " leave them out for rows of one sequence"
        )
    follows = positions[:, 1:] == positions[:, :-1] + 1
    predicted = real[:, 1:] & real[:, :-1] & follows
    return TokenRows(input_ids.long(), real, tuple(lengths), predicted)


class PolicyEngine(Protocol):
    """The engine as a policy sees it (`qarl.api.engine.Engine`)."""

    def admit(self, policy: "Policy") -> Publish:
        """Load the policy's present version."""
        ...


class Policy(nn.Module):
    """Causal LM whose forward multiplies low-bit tensors, and whose parameters are their masters
    (`qarl.align`).
    """

    def __init__(self, model: LowBitModel, settings: RunConfig, folder: Path):
        super().__init__()
        # Not a submodule, so that each master has one name, that of transformers.
        self.__dict__["low_bit"] = model
        self.low_bit: LowBitModel
        """The model itself."""
        for name, child in model.module.named_children():
            self.add_module(name, child)
        self.settings = settings
        """Configuration made of the arguments of `align`."""
        self.folder = folder
        """Folder with the tokenizer that exports get."""
        self.config = model.config
        """Configuration of the transformers model."""
        self.device = model.device
        """Device of masters and forwards."""
        self.dtype = model.dtype
        """Dtype of activations and logits; masters have their own."""
        self.version = 0
        """Number of the present weight version; the first is 0."""
        self.run_while_idle: Callable[[str, Callable[[], Any]], Any] = at_once
        """Runs a callable while the engine is not sampling."""
        self.gate: FirstBatchGate | None = None
        """Check that the first batch must pass; set by the engine."""
        configure_backward(model, settings.learner)
        model.gradients.configure(in_place=True)
        for master in self.parameters():
            master.grad_dtype = torch.float32
        self._counted = self._counts()
        self._hashed = self._hashes()
        if model.why_not_engine:
            warnings.warn(
                f"log-probs are near the engine's, not equal: {model.why_not_engine}",
                stacklevel=3,
            )

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
        *,
        logits_to_keep: int = 0,
        use_cache: bool = False,
    ) -> CausalLMOutput:
        """Compute next-token logits, with gradient to the masters.

        Args:
            input_ids: int64 [B, T], one sequence a row, padded on either side, or several a row.
            attention_mask: [B, T], 0 at padding.
            position_ids: [B, T], starting again at 0 for every sequence of a row.
            cu_seqlens: [S + 1], the starts of S sequences in the only row, and its length.
            logits_to_keep: Compute logits of this many last tokens of each row; 0: of all.
            use_cache: Must be false, because a policy has no cache.

        Returns:
            `.logits`, compute dtype [B, T or logits_to_keep, V], zero at padding.

        Raises:
            PolicyError: Tensors contradict each other, `use_cache` is true, or masters changed
                since `refresh`. Only writes that torch counts are seen here, which leaves out those
                of a fused optimizer; `publish` sees all.
        """
        if use_cache:
            raise PolicyError(
                "use_cache true: a policy keeps no cache; omit it, and sample with qarl.engine"
            )
        rows = self._rows(input_ids, attention_mask, position_ids, cu_seqlens)
        columns = rows.real.shape[1]
        width = min(logits_to_keep, columns) or columns
        mask = rows.real & (torch.arange(-columns, 0, device=self.device) >= -width)
        if self.low_bit.operators == "engine":
            hidden = self.low_bit.hidden(rows.tokens, mask, packed=rows.packed())
        else:
            hidden = self.low_bit.hidden(rows.padded(rows.tokens), rows.padded(mask))
        logits = self.low_bit.head(hidden)
        mask = mask[:, -width:]
        padded = logits.new_zeros(*mask.shape, logits.shape[-1])
        padded = padded.masked_scatter(mask[..., None], logits)
        return CausalLMOutput(logits=padded)  # type: ignore[arg-type]

    def logprobs(
        self,
        input_ids: torch.Tensor,
        mask: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
        *,
        temperature: float = 1.0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute log-probs of input_ids[:, 1:], with gradient to the masters, and entropies.

        The entropies are those of the distributions that the tokens are from, without gradient.
        Both are fp32 [B, T-1], nats, and zero outside `mask`. The log-probs equal those of the
        engine's sampler to the bit, unless `align` warned otherwise. Few logits are in memory at
        once.

        mask: bool [B, T-1], tokens to compute. Default: all that have one before them in their
        sequence. temperature: temperature that the tokens were sampled at. For other arguments and
        errors see `forward`.
        """
        rows = self._rows(input_ids, attention_mask, position_ids, cu_seqlens)
        sampled = mask if mask is None else mask.to(self.device).bool()
        mask = rows.predicted if sampled is None else sampled
        if mask.shape != rows.predicted.shape or (mask & ~rows.predicted).any():
            raise PolicyError(
                f"mask {list(mask.shape)} must be bool {list(rows.predicted.shape)}, true at column"
                " t only where tokens t and t + 1 are of one sequence"
            )
        chunk = self.settings.learner.logprob_chunk_tokens
        if self.low_bit.operators == "engine":
            packed = rows.packed(sampled)
            tokens = rows.tokens
            wanted = mask
        else:
            packed = None
            tokens = rows.padded(rows.tokens)
            wanted = rows.padded(nn.functional.pad(mask, (0, 1)))[:, :-1]
        computed = token_logprobs(
            self.low_bit,
            tokens,
            wanted,
            packed=packed,
            chunk_tokens=chunk,
            temperature=_positive(temperature),
        )
        empty = torch.zeros(mask.shape, device=self.device)
        values, entropies = (empty.masked_scatter(mask, part[wanted]) for part in computed)
        return values, entropies

    def batch_logprobs(self, batch: Batch, *, temperature: float = 1.0) -> torch.Tensor:
        """Compute log-probs of a batch's responses as `qarl train` does.

        Returns fp32 [B, T-1], nats, zero elsewhere, with gradient to the masters. On CPUs a prompt
        is computed once for all its completions. The first batch after an engine was opened, before
        a `refresh`, must pass the gate: `GateError` if the engine sampled with other log-probs.
        """
        self._require_fresh(by_value=False)
        scorer = Scorer(self.low_bit, self.settings.learner, Processes(), _positive(temperature))
        result = self._scored(scorer, batch)
        if self.gate is not None:
            learner = result.detach().cpu()
            mask = batch.response_mask.cpu()
            dtype = self.low_bit.context.dtype
            require_finite_scores(learner, mask, "the policy's first batch", dtype)
            sampled = batch.sampler_logprobs.cpu()
            require_finite_scores(sampled, mask, "the engine's first batch", dtype)

            def floor() -> Mismatch:
                with (
                    torch.no_grad(),
                    self.low_bit.context.other_roundings(OTHER_ROUNDINGS_SEED),
                ):
                    return measure_mismatch(self._scored(scorer, batch).cpu(), learner, mask)

            self.gate(measure_mismatch(learner, sampled, mask), floor)
            self.gate = None
        return result

    def _scored(self, scorer: Scorer, batch: Batch) -> torch.Tensor:
        """Return log-probs fp32 [B, T-1], with gradient if that is enabled."""
        order = []
        values = []
        width = batch.response_mask.shape[1]
        for micro in scorer.micro_batches(batch, torch.arange(len(batch.tokens))):
            own, _ = scorer.token_logprobs(
                self.low_bit, batch.rows(micro.index).to(self.device), micro.chunks, entropy=False
            )
            order.append(micro.index)
            values.append(nn.functional.pad(own, (0, width - own.shape[1])))
        return torch.cat(values)[torch.cat(order).argsort().to(self.device)]

    def refresh(self) -> None:
        """Make a weight version of the masters' present values, for forwards, publish and export.

        Call it after every optimizer step. Raises `PolicyError` while an engine in this process
        samples, because its layers are written, and if there are gradients but no master changed,
        because the optimizer then steps other parameters.
        """
        unmoved = self._counts() == self._counted and torch.equal(self._hashes(), self._hashed)
        gradients = (m.grad for m in self.parameters() if m.grad is not None)
        if unmoved and any(gradient.any() for gradient in gradients):
            raise PolicyError(
                "refresh: gradients wait at the policy's masters, and none has moved since the last"
                " refresh; step an optimizer of policy.parameters(), made after qarl.align"
                " (policy.check tells which it steps)"
            )
        self.run_while_idle("refresh", self._refresh)

    def _refresh(self) -> None:
        self.low_bit.refresh()
        self._counted = self._counts()
        self._hashed = self._hashes()
        self.gate = None
        self.version += 1

    def publish(self, engine: PolicyEngine) -> Publish:
        """Load the present weight version into the engine, and return the proof that it arrived.

        The proof has digest, tensors, bytes, seconds and, at intervals, the canary. Raises
        `PolicyError` if masters changed since `refresh`, for another policy's engine and for one
        that is sampling; `PublishError` if the engine does not hold what was sent.
        """
        self._require_fresh()
        return engine.admit(self)

    def export(self, folder: str | Path) -> str:
        """Write the present weight version as a checkpoint for vLLM and transformers.

        Returns the digest of its tensors. Raises `PolicyError` if masters changed since `refresh`,
        `ExportError` if the folder exists.
        """
        self._require_fresh()
        return export_checkpoint(self.low_bit, self.folder, Path(folder)).hexdigest()

    def low_bit_tensors(self) -> Iterator[LowBitTensor]:
        """Return every tensor of the checkpoint, with its name in it.

        They are the buffers that are multiplied; read them before the next `refresh`, which writes
        them. Raises `PolicyError` if masters changed since the last `refresh`.
        """
        self._require_fresh()
        return self.low_bit.low_bit_tensors()

    def muon_groups(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Return the masters that are matrices of the decoder, which Muon is for, and all others
        (embeddings, norms, …).
        """
        names = self.low_bit.matrices()
        matrices: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, master in self.named_parameters():
            (matrices if name in names and master.ndim > 1 else others).append(master)
        return matrices, others

    def check(self, *optimizers: torch.optim.Optimizer, tokenizer: Any = None) -> None:
        """Raise `PolicyError` if optimizers or tokenizer do not fit the policy.

        Together the optimizers must step exactly the policy's masters. The tokenizer must have the
        tokens and the EOS token of the engine's.
        """
        stepped = {
            id(p)
            for optimizer in optimizers
            for group in optimizer.param_groups
            for p in group["params"]
        }
        missing = [name for name, master in self.named_parameters() if id(master) not in stepped]
        foreign = len(stepped) - len(self.low_bit.masters) + len(missing)
        if optimizers and (missing or foreign):
            raise PolicyError(
                f"the optimizer leaves out {len(missing)} masters of the policy {missing[:1]}, and"
                f" steps {foreign} other parameters; make it of policy.parameters(), after"
                " qarl.align"
            )
        if tokenizer is not None:
            ours = AutoTokenizer.from_pretrained(self.folder)
            sides = [
                {**each.get_vocab(), "its EOS token": each.eos_token_id}
                for each in (tokenizer, ours)
            ]
            entries = sides[0].items() ^ sides[1].items()
            differing = sorted({token for token, _ in entries})
            if differing:
                ids = " and ".join(str(side.get(differing[0])) for side in sides)
                raise PolicyError(
                    f"the tokenizer is not that of {str(self.folder)!r}: {len(differing)} tokens"
                    f" differ, {differing[0]!r} is {ids}; take the model's own, or save the model"
                    " with yours"
                )

    def named_parameters(
        self, prefix: str = "", *args: Any, **kwargs: Any
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Return the masters, each once, by transformers' names.

        `parameters()` returns the same masters, for any optimizer.
        """
        return (
            (f"{prefix}.{name}" if prefix else name, master)
            for name, master in self.low_bit.masters.items()
        )

    def state_dict(
        self, *, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """Return the masters by name, in the master dtype; everything else follows from them.

        destination: dictionary to add them to, that of a module with this policy as a part.
        """
        destination = {} if destination is None else destination
        destination.update(
            {
                f"{prefix}{n}": p if keep_vars else p.detach()
                for n, p in self.low_bit.masters.items()
            }
        )
        return destination

    @torch.no_grad()
    def load_state_dict(
        self,
        state_dict: Mapping[str, Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Copy masters in and `refresh`.

        Raises `PolicyError` for other names or shapes, and changes nothing then.
        """
        masters = self.low_bit.masters
        shapes = [
            {name: tuple(p.shape) for name, p in side.items()} for side in (state_dict, masters)
        ]
        entries = shapes[0].items() ^ shapes[1].items()
        differing = sorted({name for name, _ in entries})
        if differing:
            raise PolicyError(
                f"{len(differing)} entries are not this policy's masters, the first being"
                f" {differing[0]!r}: {shapes[0].get(differing[0])} instead of"
                f" {shapes[1].get(differing[0])}; see policy.state_dict()"
            )
        for name, master in masters.items():
            master.copy_(state_dict[name])
            master.grad = None
        self.refresh()
        return _IncompatibleKeys([], [])

    def train(self, mode: bool = True) -> "Policy":
        """Set the mode. It changes no computation, because the engine has no dropout."""
        self.training = mode
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> "Policy":
        """Refuse `to`, `half` and the like, unless they change nothing."""
        before = next(self.parameters()).detach()[:0]
        after = fn(before)
        if (after.device, after.dtype) != (before.device, before.dtype):
            raise PolicyError(
                f"a policy's masters stay on {before.device} in {before.dtype}, not {after.device}"
                f" in {after.dtype}; give qarl.align another master_dtype, or set"
                " CUDA_VISIBLE_DEVICES"
            )
        return self

    def _rows(self, *tensors: torch.Tensor | None) -> TokenRows:
        self._require_fresh(by_value=False)
        ids, *others = (None if tensor is None else tensor.to(self.device) for tensor in tensors)
        assert ids is not None
        return token_rows(ids, *others, vocabulary=self.config.vocab_size)

    def _counts(self) -> list[int]:
        """Return how often each master was written, as counted by torch."""
        return [master._version for master in self.parameters()]

    def _hashes(self) -> torch.Tensor:
        """Hash each master's bits, uint64 [masters]. This takes a pass, and sees every write."""
        bits = {4: torch.int32, 2: torch.int16}
        views = (m.detach().view(bits[m.itemsize]) for m in self.parameters())
        return torch.stack([torch.hash_tensor(view) for view in views])

    def _require_fresh(self, by_value: bool = True) -> None:
        """Raise `PolicyError` if masters changed since `refresh`.

        by_value: compare their bits, too, instead of torch's counts of writes only.
        """
        changed = self._counts() != self._counted
        if changed or (by_value and not torch.equal(self._hashes(), self._hashed)):
            raise PolicyError(
                f"masters moved since version {self.version} was made of them; policy.refresh()"
                " after every step"
            )


def at_once(_what: str, work: Callable[[], Any]) -> Any:
    """Call `work` at once, because there is no engine to wait for."""
    return work()


def _positive(temperature: float) -> float:
    if not temperature > 0:
        raise PolicyError(
            f"temperature {temperature} must be above 0, for log-probs are of what is sampled at it"
        )
    return temperature
