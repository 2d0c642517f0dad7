"""TRL's asynchronous trainer on an exact low-bit policy, which learns while QaRL's servers sample
(docs/guide/trl.md).

TRL's loop of prompts, tools and rewards runs in a thread, and each of its requests goes to QaRL's
engine. When TRL would send weights, the policy is published, and requests in flight on the servers
continue with the new version.

Axes: N tokens of a row of several sequences; a prefix that they share is in it once.
"""

# TRL exports its names lazily, and types its trainers' attributes as transformers' own.
# pyright: reportPrivateImportUsage=false, reportOptionalMemberAccess=false
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

import asyncio
import queue
import threading
from collections.abc import Callable, Iterator
from functools import partial
from inspect import signature
from types import MethodType, SimpleNamespace
from typing import Any

import torch
from torch import nn
from trl.experimental.async_grpo import (  # pyright: ignore[reportMissingImports]
    AsyncGRPOConfig,
    AsyncGRPOTrainer,
    async_grpo_trainer,
)
from trl.experimental.async_grpo.async_rollout_worker import (  # pyright: ignore[reportMissingImports]
    _AsyncRolloutLoop,
)
from trl.trainer.utils import FusedCausalLMOutput  # pyright: ignore[reportMissingImports]

from qarl.api.engine import Engine
from qarl.api.policy import Policy
from qarl.configs.errors import ConfigError
from qarl.configs.seeds import step_seed
from qarl.integrations.trl.grpo import adapt, opened_for
from qarl.learner.load_balance import load_balance_loss
from qarl.learner.logprobs import token_logprobs
from qarl.quant.graph.packing import Packed, Sequences


class LowBitAsyncGRPOTrainer(AsyncGRPOTrainer):
    """TRL's `AsyncGRPOTrainer` for a policy that `qarl.align` made.

    model: the policy. engine: servers that take weights while they sample, `qarl.engine(policy,
    urls=[URL, …], max_staleness=2)`. Other arguments are TRL's. Raises `ConfigError` for an option
    that does not go with an exact policy, by name, and for another engine.
    """

    def __init__(
        self,
        model: Policy,
        reward_funcs: Any = None,
        args: Any = None,
        *,
        engine: Engine,
        **trl: Any,
    ):
        args = args or AsyncGRPOConfig("low-bit-AsyncGRPO", bf16=False)
        if args.world_size > 1:
            raise ConfigError(
                f"{args.world_size} processes would each publish to the servers; take one, or"
                " LowBitGRPOTrainer without servers"
            )
        adapt(model, args, trl)
        self.engine = engine
        rollout = opened_for(args, engine)
        if rollout.max_staleness < 2:  # 2 and more need servers
            raise ConfigError(
                "the asynchronous trainer learns while its engine samples: give it servers that"
                " take weights then, qarl.engine(policy, urls=[URL, ...], max_staleness=2)"
            )
        if args.token_budget is None:  # TRL would ask its server
            args.token_budget = rollout.longest
        functions = reward_funcs
        if not isinstance(reward_funcs, list):
            functions = [reward_funcs] if reward_funcs else []
        loop_arguments = {
            "reward_funcs": functions,
            **{name: trl[name] for name in ("tools", "environment_factory") if name in trl},
        }
        rollouts = _Rollouts(self, args, loop_arguments)
        trl |= {"rollout_worker": rollouts, "weight_transfer": rollouts}
        if not torch.cuda.is_available():
            # TRL 1.16 asks CUDA for the device's name on CPUs too, to report a fraction of its peak
            # throughput, so the trainer cannot be made there. Remove this when
            # `trl.trainer.utils.get_peak_flops_per_device` checks for CUDA first.
            async_grpo_trainer.get_peak_flops_per_device = lambda accelerator, dtype: None
        super().__init__(str(model.folder), reward_funcs, args, **trl)
        self.policy = model
        self.model = model.low_bit.module
        self.model_wrapped = model.low_bit.module
        model.low_bit.router_log.enable(self.aux_loss_enabled)
        self.model.forward = MethodType(_packed_forward(model, args.temperature), self.model)


class _Rollouts:
    """Implementation of TRL's `RolloutWorkerProtocol` and `WeightTransferProtocol`
    (`trl.experimental.async_grpo.async_grpo_trainer`) by one engine, whose servers pause by
    themselves. loop_arguments: arguments of TRL's loop that are not among its options.
    """

    def __init__(self, trainer: LowBitAsyncGRPOTrainer, args: Any, loop_arguments: dict[str, Any]):
        self._trainer = trainer
        self._loop_arguments = loop_arguments
        self._turns = 0
        """Number of turns sampled so far; each has its own seed."""
        self.rollout_buffer: queue.Queue[Any] = queue.Queue(args.queue_maxsize)
        self.metrics_queue: queue.Queue[Any] = queue.Queue(4096)
        self._version = SimpleNamespace(value=0)
        self._failed = threading.Event()
        self._reason = queue.Queue(1)
        """Description of a failure of TRL's loop, as arguments of a message."""
        self._thread = threading.Thread(
            target=lambda: self._loop.run(), name="rollouts", daemon=True
        )

    def start(self) -> None:
        trainer = self._trainer
        args = trainer.args
        options = {
            name: getattr(args, name)
            for name in signature(_AsyncRolloutLoop).parameters
            if hasattr(args, name)
        }
        self._loop = _AsyncRolloutLoop(
            model_name="",
            dataset=trainer.train_dataset,
            processing_class=trainer.processing_class,
            eos_token_ids=trainer.eos_token_ids,
            rollout_buffer=self.rollout_buffer,
            metrics_queue=self.metrics_queue,
            model_version_value=self._version,
            heartbeat_value=SimpleNamespace(value=0.0),
            failed_event=self._failed,
            exception_info_queue=self._reason,
            max_tokens=args.max_completion_length,
            **options,
            **self._loop_arguments,
        )
        self._loop._generate_one_turn = self._sampled
        self._thread.start()

    async def _sampled(
        self,
        prompt_ids: list[int],
    ) -> tuple[list[int], list[float]]:
        """Sample one turn: return its token ids and their log-probs."""
        seed = step_seed(self._trainer.args.seed, self._turns)
        self._turns += 1
        request = partial(self._trainer.engine.generate, [prompt_ids], seed=seed)
        ((completion,),) = await asyncio.get_running_loop().run_in_executor(
            self._loop._tool_pool, request
        )
        return list(completion.token_ids), list(completion.logprobs)

    def stop(self) -> None:
        if self._thread.is_alive():
            self._loop._loop.call_soon_threadsafe(self._loop._stop_event.set)
            self._thread.join()

    def update_model_version(self, model_version: int) -> None:
        self._version.value = model_version

    def check_health(self, stale_after_s: float) -> None:
        if self._failed.is_set():
            raise RuntimeError("the rollouts broke off: {}: {}\n{}".format(*self._reason.get()))

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        self._trainer.policy.publish(self._trainer.engine)

    def init_weight_transfer(self) -> None:
        pass

    pause = resume = destroy = init_weight_transfer


def _packed_forward(policy: Policy, temperature: float) -> Callable[..., FusedCausalLMOutput]:
    """Return a forward over a row packed as `trl.experimental.async_grpo.packing.TreeRow` does,
    computed by the policy.
    """
    chunk = policy.settings.learner.logprob_chunk_tokens

    def forward(module, input_ids, shift_labels, output_router_logits=False, **tree):
        """Return log-probs and entropies, fp32 [1, N], 0 at labels of -100.

        input_ids, shift_labels: int64 [1, N]. tree: TRL's layout of the row.
        """
        wanted = shift_labels[:, :-1] != -100
        if not torch.equal(shift_labels[:, :-1][wanted], input_ids[:, 1:][wanted]):
            raise ConfigError(
                "a token's label is not the next one of its row: this version of TRL packs"
                " otherwise"
            )
        real = torch.ones_like(input_ids, dtype=torch.bool)
        lengths, key_lengths = (
            tuple(tree[f"tree_cu_seqlens_{name}"].diff().tolist()) for name in ("q", "k")
        )
        positions = torch.arange(real.shape[1], device=real.device)[None]
        sequences = Sequences(lengths, key_lengths, tree["tree_kv_index"])
        packed = Packed(real, positions, sequences)
        computed = token_logprobs(
            policy.low_bit,
            input_ids,
            wanted,
            packed=packed,
            chunk_tokens=chunk,
            temperature=temperature,
        )
        log_probs, entropy = (nn.functional.pad(part, (0, 1)) for part in computed)
        aux_loss = load_balance_loss(policy.low_bit, real, packed) if output_router_logits else None
        return FusedCausalLMOutput(log_probs=log_probs, entropy=entropy, aux_loss=aux_loss)

    return forward
