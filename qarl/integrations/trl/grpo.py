"""TRL's `GRPOTrainer` on an exact low-bit policy (docs/guide/trl.md).

TRL keeps the transformers model, whose parameters are the masters. The model's forward is replaced
by the policy's packed one, and generation by QaRL's engine. Every optimizer step is followed by a
new weight version.

Axes: B sequences, T tokens: prompts are padded on the left, and completions on the right.
"""

# TRL exports its names lazily, and types its trainers' attributes as transformers' own.
# pyright: reportPrivateImportUsage=false, reportOptionalMemberAccess=false
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

import dataclasses
import logging
from collections.abc import Callable
from contextlib import nullcontext
from types import MethodType, SimpleNamespace
from typing import Any

import torch
from transformers import TrainerCallback
from trl import (  # pyright: ignore[reportMissingImports]
    GRPOConfig,  # pyright: ignore[reportAttributeAccessIssue]
    GRPOTrainer,  # pyright: ignore[reportAttributeAccessIssue]
)
from trl.trainer.utils import FusedCausalLMOutput  # pyright: ignore[reportMissingImports]

from qarl.api.engine import Engine
from qarl.api.engine import engine as open_engine
from qarl.api.policy import Policy
from qarl.configs.errors import ConfigError
from qarl.configs.schema.objectives import TruncatedConfig
from qarl.configs.schema.rollout import RolloutConfig
from qarl.configs.seeds import step_seed
from qarl.learner.batching import Batch
from qarl.learner.load_balance import load_balance_loss
from qarl.learner.logprobs import shares_prompts, token_logprobs
from qarl.learner.loss.corrections import correction
from qarl.learner.mismatch import Mismatch, measure_mismatch
from qarl.quant.runtime.libraries import untested_libraries
from qarl.run.session import gate_of
from qarl.sync.floor import OTHER_ROUNDINGS_SEED

_log = logging.getLogger(__name__)
_LONGEST = 2048
"""Upper bound on prompt and completion tokens, if vllm_max_model_length is not set."""
_LONGEST_VALUE = 60
"""Length in characters up to which a refused value is quoted."""
_REFUSED = {
    "QaRL's engine generates; open it beforehand, with its options, by qarl.engine(policy, ...)": (
        "generation_kwargs cache_implementation use_transformers_continuous_batching vllm_mode"
        " vllm_model_impl vllm_enable_sleep_mode vllm_gpu_memory_utilization"
        " vllm_tensor_parallel_size vllm_structured_outputs_regex"
    ),
    "masters would be moved, cut or rounded; the policy is what qarl.align made": (
        "fp16 bf16_full_eval fp16_full_eval deepspeed fsdp model_init_kwargs quantization_config"
    ),
    (
        "adapters beside the base are not in the codes that the engine samples from; `qarl train"
        " --learner.lora.name lora` merges them into every weight version"
    ): "peft_config",
    "it changes a forward that does not run, for the policy's is the engine's": (
        "use_liger_kernel cast_lm_head_to_fp32 torch_compile neftune_noise_alpha"
    ),
    "the learner's log-probs are of all tokens": "top_p top_k min_p repetition_penalty",
    (
        "TRL's own loop would sample several turns, which is not proven exact; `qarl train` has"
        " environments and tools"
    ): "tools environment_factory rollout_func",
    "the policy's entropies carry no gradient": "entropy_coef use_adaptive_entropy",
    (
        "TRL's reference is an unquantized model, not what the policy was at first; `qarl train`"
        " has learner.kl"
    ): "beta",
}
"""Options that must keep their defaults, by the reason."""


class LowBitGRPOTrainer(GRPOTrainer):
    """TRL's `GRPOTrainer` for a policy that `qarl.align` made.

    Args:
        model: The policy.
        reward_funcs: TRL's.
        args: TRL's. The policy does gradient checkpointing, and bf16 autocast is left out; a log
            line says so.
        engine: Engine that samples, by `qarl.engine`. None opens one in this process, with the
            limits in `args`.
        geometric_cap: Weigh sequences by QaRL's geometric correction, within [1 / cap, cap]; 0: by
            TRL's correction.
        trl: Other arguments of TRL's trainer.

    Raises:
        ConfigError: An option does not go with an exact policy; the message names it.
        GateError: A batch shows that learner and engine are not the same policy.
    """

    def __init__(
        self,
        model: Policy,
        reward_funcs: Any = None,
        args: Any = None,
        engine: Engine | None = None,
        geometric_cap: float = 0,
        **trl: Any,
    ):
        args = args or GRPOConfig("low-bit-GRPO", bf16=False)
        adapt(model, args, trl)
        if geometric_cap and not args.vllm_importance_sampling_correction:
            raise ConfigError(
                f"geometric_cap {geometric_cap} needs vllm_importance_sampling_correction True"
            )
        if args.world_size > 1 and engine is not None and engine.settings.rollout.servers:
            raise ConfigError(
                f"{args.world_size} processes would each publish to the engine's servers; leave"
                " engine out, so that each process samples in itself, or take one process"
            )
        if engine is not None and not isinstance(engine, Engine):
            raise ConfigError(
                f"engine is a {type(engine).__name__}; give what qarl.engine returned, and"
                " TRL's other arguments, such as train_dataset, by name"
            )
        args.use_vllm = False  # True would start an engine of TRL's
        super().__init__(model.low_bit.module, reward_funcs, args, **trl)  # type: ignore[arg-type]
        self.policy = model
        self._geometric = None
        if geometric_cap:
            self._geometric = TruncatedConfig(name="geometric", cap=geometric_cap)
        model.low_bit.router_log.enable(self.aux_loss_enabled)
        self.model.forward = MethodType(_fused_forward(model, args.temperature), self.model)
        if engine is None:
            positions = getattr(model.config, "max_position_embeddings", _LONGEST)
            longest = args.vllm_max_model_length or min(_LONGEST, positions)
            limits = {
                "max_prompt_tokens": longest - args.max_completion_length,
                "max_new_tokens": args.max_completion_length,
                "temperature": args.temperature,
            }
            engine = open_engine(model, tokenizer=self.processing_class, **limits)
        self.engine = engine
        self._gate = gate_of(self.engine.settings, model.low_bit, self.engine.rows)
        # TRL takes vLLM's path from here on, with this trainer as its `vllm_generation`.
        self.use_vllm = True
        self._last_loaded_step = -1
        self._round = (0, -1)
        """Number of the generation batch, and of the request in it, counted from 0."""
        self.vllm_generation: Any = self
        # TRL reads max_model_len to drop longer prompts of tool calls.
        config = SimpleNamespace(max_model_len=opened_for(args, self.engine).max_prompt_tokens + 1)
        self.llm = SimpleNamespace(llm_engine=SimpleNamespace(model_config=config))

    def sync_weights(self) -> None:
        """Publish the present weight version. TRL calls this on its `vllm_generation`."""
        self.policy.publish(self.engine)

    def generate(
        self,
        prompts: list[list[int]],
        images: Any,
        num_generations: int,
        profiler: Any = None,
    ) -> Any:
        """Sample completions of this process's prompts, each of which comes `num_generations`
        times.

        Returns the prompts, completions' token ids, log-probs [B][T][1], and None. Seeds depend on
        (seed, step, number of the request in it, number of the prompt in all processes) only, so a
        resumed training repeats them.
        """
        step = self.state.global_step
        updates = self.args.steps_per_generation * self.num_iterations
        batch = -1 - step  # negative in evaluations, which have seeds of their own
        if self.model.training:
            batch = step // max(1, updates // self.args.gradient_accumulation_steps)
        self._round = (batch, self._round[1] + 1 if self._round[0] == batch else 0)
        distinct = prompts[::num_generations]
        # Environments may have changed each prompt; then each is sampled once.
        if prompts != [ids for ids in distinct for _ in range(num_generations)]:
            distinct = prompts
            num_generations = 1
        seed = step_seed(self.args.seed, *self._round)
        with profiler or nullcontext():
            answers = self.engine.generate(
                distinct,
                samples=num_generations,
                seed=seed,
                first_prompt=self.accelerator.process_index * len(distinct),
            )
        completions = [completion for group in answers for completion in group]
        logprobs = [[[logprob] for logprob in c.logprobs] for c in completions]
        return prompts, [list(c.token_ids) for c in completions], logprobs, None

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        before = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        if not self.model.training or self._buffered_inputs is before:
            return inputs
        self._buffered_inputs = by_prompt(self._buffered_inputs)
        return self._buffered_inputs[self._step % self.args.steps_per_generation]

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        old = output.get("old_per_token_logps")
        sampler = output.get("sampling_per_token_logps")
        if old is not None and sampler is not None:
            mask = (output["completion_mask"] * output.get("tool_mask", 1)).bool()
            # With mask_truncated_completions a batch may have no token to learn from.
            if self._gate and mask.any():
                mismatch = measure_mismatch(old.cpu(), sampler.cpu(), mask.cpu())
                self._gate(mismatch, lambda: self._rounding_floor(output, old, mask))
            if self._geometric:
                corrected = correction(old, sampler, mask, self._geometric)
                output["importance_sampling_ratio"] = corrected.weight
        return output

    @torch.no_grad()
    def _rounding_floor(
        self, output: dict[str, Any], old: torch.Tensor, mask: torch.Tensor
    ) -> Mismatch:
        """Return the mismatch between `old`, [B, T], and log-probs with other roundings, where
        `mask` is true.
        """
        tokens = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
        attended = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
        length = output["completion_ids"].shape[1]
        with self.policy.low_bit.context.other_roundings(OTHER_ROUNDINGS_SEED):
            moved = self._get_per_token_logps_and_entropies(self.model, tokens, attended, length)[0]
        return measure_mismatch(moved.cpu(), old.cpu(), mask.cpu())


class _Refresh(TrainerCallback):
    """Makes weight versions: at the start (of a checkpoint's masters if TRL resumed), after every
    optimizer step, and at the end (of the best model if TRL loaded it).
    """

    def __init__(self, policy: Policy):
        self._policy = policy

    def on_train_begin(self, args: Any, state: Any, control: Any, **trained: Any) -> None:
        self._policy.check(trained["optimizer"])
        self._policy.refresh()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # transformers does the same next. Here it keeps `refresh` from refusing a step that moved
        # nothing, by zero gradients or at learning rate 0.
        self._policy.zero_grad()
        self._policy.refresh()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._policy.refresh()


def adapt(policy: Policy, args: Any, trl: dict[str, Any]) -> None:
    """Make the policy do what TRL's options would ask of transformers, and log it.

    args: arguments of either trainer; they are changed. trl: other arguments; a callback is added.
    Raises `ConfigError` for an option that does not go with an exact policy, by name.
    """
    if not isinstance(policy, Policy):
        raise ConfigError(
            f"model is a {type(policy).__name__}; give a policy: qarl.align(model, scheme)"
        )
    if policy.low_bit.operators != "engine":
        raise ConfigError(
            "the policy has transformers' operators in TRL's model:"
            f" {policy.low_bit.why_not_engine}"
        )
    defaults = {field.name: field.default for field in dataclasses.fields(args)}
    for reason, names in _REFUSED.items():
        for name in names.split():
            value = getattr(args, name, trl.get(name))
            if value != defaults.get(name):
                text = repr(value)  # a LoraConfig's has a thousand characters
                text = text if len(text) <= _LONGEST_VALUE else f"(a {type(value).__name__})"
                raise ConfigError(f"{name} {text}: {reason}; leave {name} out")
    for line in untested_libraries():
        _log.warning(line)
    if args.gradient_checkpointing:
        _log.warning("gradient_checkpointing: by the policy, not by transformers")
        policy.low_bit.set_gradient_checkpointing(True)
    if args.bf16:
        _log.warning(
            "bf16: no autocast, the policy computes in %s",
            str(policy.dtype).removeprefix("torch."),
        )
    args.gradient_checkpointing = False
    args.bf16 = False
    args.mixed_precision = "no"
    trl["callbacks"] = [_Refresh(policy), *(trl.get("callbacks") or [])]


def by_prompt(batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return TRL's shuffled batches with the completions of one prompt beside each other, so that
    a forward computes their prompt once. Prompts are in the order of their first completions.

    batches: equal numbers of completions, padded alike; tensors [B, ...], lists, and what all
    completions have in common.
    """
    prompts = torch.cat([batch["prompt_ids"] for batch in batches])
    _, prompt = prompts.unique(dim=0, return_inverse=True)
    first = torch.full((len(prompts),), len(prompts)).scatter_reduce(
        0, prompt.cpu(), torch.arange(len(prompts)), "amin"
    )
    order = first[prompt.cpu()].argsort(stable=True)
    size = len(prompts) // len(batches)
    result: list[dict[str, Any]] = [{} for _ in batches]
    for name, value in batches[0].items():
        parts: Any = [value] * len(batches)
        if isinstance(value, torch.Tensor) and value.ndim:
            values = torch.cat([batch[name] for batch in batches])
            parts = values[order.to(values.device)].split(size)
        elif isinstance(value, list):
            flat = [item for batch in batches for item in batch[name]]
            moved = [flat[n] for n in order.tolist()]
            parts = [moved[n : n + size] for n in range(0, len(moved), size)]
        for batch, part in zip(result, parts, strict=True):
            batch[name] = part
    return result


def opened_for(args: Any, engine: Engine) -> RolloutConfig:
    """Return the limits an engine was opened with. Raises `ConfigError` if `args` has others."""
    rollout = engine.settings.rollout
    for name, value in (
        ("temperature", args.temperature),
        ("max_new_tokens", args.max_completion_length),
    ):
        if getattr(rollout, name) != value:
            raise ConfigError(
                f"the engine was opened with {name} {getattr(rollout, name)}, and TRL's args say"
                f" {value}"
            )
    return rollout


def _fused_forward(policy: Policy, temperature: float) -> Callable[..., FusedCausalLMOutput]:
    """Return a forward like `trl.trainer.utils.add_fused_lm_head`'s, computed by the policy."""
    shares = shares_prompts(True, "auto", policy.device)
    chunk = policy.settings.learner.logprob_chunk_tokens

    def forward(
        module,
        input_ids,
        attention_mask,
        labels=None,
        fused_lm_head=False,
        output_router_logits=False,
    ):
        """Return log-probs and entropies, fp32 [B, T-1], 0 where a label is -100.

        input_ids, labels: int64 [B, T].
        """
        if labels is None or not fused_lm_head:
            raise ConfigError(
                "TRL asked for logits, and the policy gives log-probs; trainer.engine samples"
            )
        column = torch.arange(input_ids.shape[1], device=input_ids.device)
        # Rotate each row to the left, so that all its padding is on the right.
        columns = (column + attention_mask.argmax(-1, keepdim=True)) % len(column)
        tokens = input_ids.gather(1, columns)
        wanted = labels.gather(1, columns)[:, 1:] != -100
        zeros = torch.zeros(wanted.shape, device=tokens.device)
        if not wanted.any():
            return FusedCausalLMOutput(
                log_probs=zeros.requires_grad_(),
                entropy=zeros,
                aux_loss=zeros.sum(),
            )
        prompts = tokens.where(column <= wanted.int().argmax(-1, keepdim=True), -1)
        batch = Batch(
            tokens=tokens,
            length=attention_mask.sum(-1),
            response_mask=wanted,
            sampler_logprobs=zeros,
            advantages=zeros,
            group=prompts.unique(dim=0, return_inverse=True)[1],
        )
        packed = batch.packed(shares)
        # Columns before the rotation. Those below 0 are of padding, whose values are zero.
        original = (columns[:, 1:] - 1).clamp(min=0)
        computed = token_logprobs(
            policy.low_bit,
            tokens,
            wanted,
            packed=packed,
            chunk_tokens=chunk,
            temperature=temperature,
        )
        log_probs, entropy = (zeros.scatter(1, original, part) for part in computed)
        aux_loss = None
        if output_router_logits:
            aux_loss = load_balance_loss(policy.low_bit, batch.real(), packed)
        return FusedCausalLMOutput(log_probs=log_probs, entropy=entropy, aux_loss=aux_loss)

    return forward
