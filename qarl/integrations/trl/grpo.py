"""TRL's `GRPOTrainer` on an exact low-bit policy (docs/guide/trl.md).

TRL keeps the transformers model, whose parameters are the masters. Exchanged are its forward, for
the policy's packed one; what generates, for QaRL's engine; and every optimizer step is followed by
a new weight version.

Axes: B sequences, T tokens: of prompts, padded on the left, and completions, padded on the right.
"""

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
from qarl.configs.schema.run import RolloutConfig
from qarl.configs.seeds import step_seed
from qarl.learner.batching import Batch
from qarl.learner.load_balance import load_balance_loss
from qarl.learner.logprobs import shares_prompts, token_logprobs
from qarl.learner.loss.corrections import correction
from qarl.learner.mismatch import Mismatch, measure_mismatch
from qarl.run.session import gate_of
from qarl.sync.floor import OTHER_ROUNDINGS_SEED

_log = logging.getLogger(__name__)
# tokens of prompt and completion, where vllm_max_model_length does not say
_LONGEST = 2048
_REFUSED = {
    "QaRL's engine generates; open it beforehand, with its options, by qarl.engine(policy, ...)": (
        "generation_kwargs cache_implementation use_transformers_continuous_batching vllm_mode"
        " vllm_model_impl vllm_enable_sleep_mode vllm_gpu_memory_utilization"
        " vllm_tensor_parallel_size vllm_structured_outputs_regex"
    ),
    "masters would be moved, cut or rounded; the policy is what qarl.align made": (
        "fp16 bf16_full_eval fp16_full_eval deepspeed fsdp model_init_kwargs peft_config"
        " quantization_config"
    ),
    "it changes a forward that does not run, for the policy's is the engine's": (
        "use_liger_kernel cast_lm_head_to_fp32 torch_compile neftune_noise_alpha"
    ),
    "the learner's log-probs are of all tokens": "top_p top_k min_p repetition_penalty",
    "TRL's own loop would sample several turns, which is not proven exact": (
        "tools environment_factory rollout_func"
    ),
    "the policy's entropies carry no gradient": "entropy_coef use_adaptive_entropy",
    "TRL's reference is an unquantized model, not what the policy was at first; `qarl train` has learner.kl": (
        "beta"
    ),
}
"""Why → options that have to stay as they are by default."""


class LowBitGRPOTrainer(GRPOTrainer):
    """TRL's `GRPOTrainer` of a policy that `qarl.align` made.

    model: the policy. args: TRL's; gradient checkpointing is done by the policy, and bf16 autocast
    left out, each said in a line. engine: what samples, of `qarl.engine`; None opens one in this
    process, for what `args` says. geometric_cap: weigh sequences by QaRL's geometric correction,
    within [1 / cap, cap]; 0: by TRL's. Other arguments are TRL's. Raises `ConfigError`, by name,
    for options that do not go with an exact policy, and `GateError` for a batch that shows two
    policies.
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
        args.use_vllm = False  # True would start an engine of TRL's
        super().__init__(model.low_bit.module, reward_funcs, args, **trl)  # type: ignore[arg-type]
        self.policy = model
        self._geometric = (
            TruncatedConfig(name="geometric", cap=geometric_cap) if geometric_cap else None
        )
        model.low_bit.router_log.enable(self.aux_loss_enabled)
        self.model.forward = MethodType(_fused_forward(model, args.temperature), self.model)
        if engine is None:
            longest, answer = (
                getattr(model.config, "max_position_embeddings", _LONGEST),
                args.max_completion_length,
            )
            prompt = (args.vllm_max_model_length or min(_LONGEST, longest)) - answer
            limits = {
                "max_prompt_tokens": prompt,
                "max_new_tokens": answer,
                "temperature": args.temperature,
            }
            engine = open_engine(model, tokenizer=self.processing_class, **limits)
        self.engine = engine
        self._gate = gate_of(self.engine.settings, model.low_bit, self.engine.rows)
        self.use_vllm, self._last_loaded_step, self._round = True, -1, (0, -1)
        self.vllm_generation: Any = self
        config = SimpleNamespace(max_model_len=opened_for(args, self.engine).max_prompt_tokens + 1)
        # tool calls drop longer prompts
        self.llm = SimpleNamespace(llm_engine=SimpleNamespace(model_config=config))

    def sync_weights(self) -> None:
        """Publish the present weight version: of TRL's `vllm_generation`, as which the trainer
        serves itself.
        """
        self.policy.publish(self.engine)

    def generate(
        self,
        prompts: list[list[int]],
        images: Any,
        num_generations: int,
        profiler: Any = None,
    ) -> Any:
        """prompts: token ids, each `num_generations` times. Returns them, completions' ids, and
        log-probs [B][T][1]. Seeds are functions of (seed, step, number of the batch in it), so a
        resumed training repeats them.
        """
        step, updates = (
            self.state.global_step,
            self.args.steps_per_generation * self.num_iterations,
        )
        batch = (
            step // max(1, updates // self.args.gradient_accumulation_steps)
            if self.model.training
            else -1 - step
        )
        self._round = (batch, self._round[1] + 1 if self._round[0] == batch else 0)
        distinct = prompts[::num_generations]
        # environments make each its own
        if prompts != [ids for ids in distinct for _ in range(num_generations)]:
            distinct, num_generations = prompts, 1
        seed = step_seed(self.args.seed, *self._round)
        with profiler or nullcontext():
            answers = self.engine.generate(distinct, samples=num_generations, seed=seed)
        completions = [completion for of_prompt in answers for completion in of_prompt]
        logprobs = [[[logprob] for logprob in c.logprobs] for c in completions]
        return prompts, [list(c.token_ids) for c in completions], logprobs, None

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        old, sampler = (
            output.get("old_per_token_logps"),
            output.get("sampling_per_token_logps"),
        )
        if old is not None and sampler is not None:
            mask = (output["completion_mask"] * output.get("tool_mask", 1)).bool()
            if self._gate:
                mismatch = measure_mismatch(old.cpu(), sampler.cpu(), mask.cpu())
                self._gate(mismatch, lambda: self._rounding_floor(output, old, mask))
            if self._geometric:
                output["importance_sampling_ratio"] = correction(
                    old, sampler, mask, self._geometric
                ).weight
        return output

    @torch.no_grad()
    def _rounding_floor(
        self, output: dict[str, Any], old: torch.Tensor, mask: torch.Tensor
    ) -> Mismatch:
        """Return how far log-probs with other roundings are from `old`'s, [B, T], where `mask` is
        true.
        """
        tokens = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
        attended = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
        length = output["completion_ids"].shape[1]
        with self.policy.low_bit.context.other_roundings(OTHER_ROUNDINGS_SEED):
            moved = self._get_per_token_logps_and_entropies(self.model, tokens, attended, length)[0]
        return measure_mismatch(moved.cpu(), old.cpu(), mask.cpu())


class _Refresh(TrainerCallback):
    """Makes weight versions: of a checkpoint's masters, after every optimizer step, of the best
    model.
    """

    def __init__(self, policy: Policy):
        self._policy = policy

    def on_train_begin(self, args: Any, state: Any, control: Any, **trained: Any) -> None:
        self._policy.check(trained["optimizer"])
        self._policy.refresh()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # as transformers does next: a step by zero gradients, or at rate 0, is one, too
        self._policy.zero_grad()
        self._policy.refresh()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._policy.refresh()


def adapt(policy: Policy, args: Any, trl: dict[str, Any]) -> None:
    """Have the policy do what TRL's options would ask of transformers, and say so. args: of either
    trainer, changed. trl: other arguments, to which a callback is added. Raises `ConfigError` for
    what cannot be, by name.
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
    for why, names in _REFUSED.items():
        for name in names.split():
            value = getattr(args, name, trl.get(name))
            if value != defaults.get(name):
                raise ConfigError(f"{name} {value!r}: {why}; leave {name} out")
    if args.world_size > 1:
        raise ConfigError(
            f"{args.world_size} processes would learn apart; take one, or `qarl train --processes`"
        )
    if args.gradient_checkpointing:
        _log.warning("gradient_checkpointing: by the policy, not by transformers")
        policy.low_bit.checkpoint_layers(True)
    if args.bf16:
        _log.warning(
            "bf16: no autocast, the policy computes in %s",
            str(policy.dtype).removeprefix("torch."),
        )
    args.gradient_checkpointing, args.bf16, args.mixed_precision = False, False, "no"
    trl["callbacks"] = [_Refresh(policy), *(trl.get("callbacks") or [])]


def opened_for(args: Any, engine: Engine) -> RolloutConfig:
    """What an engine was opened for. Raises `ConfigError` where `args` says otherwise."""
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
    """A model's forward as `trl.trainer.utils.add_fused_lm_head` makes one, by the policy."""
    shares, chunk = (
        shares_prompts(True, "auto", policy.device),
        policy.settings.learner.logprob_chunk_tokens,
    )

    def forward(
        module,
        input_ids,
        attention_mask,
        labels=None,
        fused_lm_head=False,
        output_router_logits=False,
    ):
        """input_ids, labels: int64 [B, T]. Returns log-probs and entropies, fp32 [B, T-1], 0 where
        a label is -100.
        """
        if labels is None or not fused_lm_head:
            raise ConfigError(
                "TRL asked for logits, and the policy gives log-probs; trainer.engine samples"
            )
        column = torch.arange(input_ids.shape[1], device=input_ids.device)
        # to where padding is on the right
        places = (column + attention_mask.argmax(-1, keepdim=True)) % len(column)
        tokens, wanted = (
            input_ids.gather(1, places),
            labels.gather(1, places)[:, 1:] != -100,
        )
        nothing = torch.zeros(wanted.shape, device=tokens.device)
        if not wanted.any():
            return FusedCausalLMOutput(
                log_probs=nothing.requires_grad_(),
                entropy=nothing,
                aux_loss=nothing.sum(),
            )
        prompts = tokens.where(column <= wanted.int().argmax(-1, keepdim=True), -1)
        batch = Batch(
            tokens=tokens,
            length=attention_mask.sum(-1),
            response_mask=wanted,
            sampler_logprobs=nothing,
            advantages=nothing,
            group=prompts.unique(dim=0, return_inverse=True)[1],
        )
        # below 0 is padding, and zero
        packed, back = batch.packed(shares), (places[:, 1:] - 1).clamp(min=0)
        computed = token_logprobs(
            policy.low_bit, tokens, wanted, None, packed, chunk, temperature=temperature
        )
        log_probs, entropy = (nothing.scatter(1, back, part) for part in computed)
        aux_loss = (
            load_balance_loss(policy.low_bit, batch.real(), packed)
            if output_router_logits
            else None
        )
        return FusedCausalLMOutput(log_probs=log_probs, entropy=entropy, aux_loss=aux_loss)

    return forward
