"""Short flags of the command line for common fields. Every field also has its dotted name."""

FLAGS = {
    "model": "model",
    "scheme": "scheme",
    "scale": "quantization.scale",
    "init": "quantization.init",
    "layers": "layers",
    "dtype": "dtype",
    "task": "task.name",
    "steps": "steps",
    "seed": "seed",
    "output": "output",
    "lr": "learner.optimizer.lr",
    "optimizer": "learner.optimizer.name",
    "objective": "learner.objective.name",
    "aligned": "learner.aligned",
    "kernel": "learner.kernel",
    "master-dtype": "learner.master_dtype",
    "mini-batches": "learner.mini_batches",
    "prompts": "rollout.prompts",
    "samples": "rollout.samples",
    "max-new-tokens": "rollout.max_new_tokens",
    "reward": "task.reward",
    "eval-every": "eval.every",
    "checkpoint-every": "checkpoint.every",
    "record": "record",
    "from-rollouts": "from_rollouts",
}
"""Short flag → dotted path of its field."""

OTHER_TRAINERS_OPTIONS = {
    "batch-size": "rollout.prompts",
    "beta": "learner.kl.coefficient",
    "bf16": "dtype",
    "dataset": "task.name",
    "deepspeed": "learner.deepspeed",
    "epsilon": "learner.objective.clip_low",
    "eval-steps": "eval.every",
    "fp16": "dtype",
    "generation-batch-size": "rollout.prompts",
    "importance-sampling-level": "learner.objective.name",
    "kl-coef": "learner.kl.coefficient",
    "learning-rate": "learner.optimizer.lr",
    "lora-r": "learner.lora.rank",
    "lora-target-modules": "learner.lora.targets",
    "loss-type": "learner.objective.name",
    "lr-scheduler-type": "learner.optimizer.decay_steps",
    "max-completion-length": "rollout.max_new_tokens",
    "max-grad-norm": "learner.optimizer.grad_clip",
    "max-prompt-length": "rollout.max_prompt_tokens",
    "max-steps": "steps",
    "model-name-or-path": "model",
    "num-generations": "rollout.samples",
    "num-iterations": "learner.mini_batches",
    "num-train-epochs": "steps",
    "output-dir": "output",
    "per-device-train-batch-size": "rollout.prompts",
    "report-to": "log",
    "ref-model": "learner.kl.name",
    "reward-funcs": "task.reward",
    "run-name": "output",
    "save-steps": "checkpoint.every",
    "scale-rewards": "learner.advantage",
    "temperature": "rollout.temperature",
    "train-dataset": "task.name",
    "use-peft": "learner.lora.name",
    "warmup-ratio": "learner.optimizer.warmup_steps",
    "warmup-steps": "learner.optimizer.warmup_steps",
}
"""Option of another trainer, dashed → dotted path of the field that does the same.

It is used only for suggestions.
"""

OPTIONS_WITHOUT_FIELD = {
    "gate-k3-bound": "sync.gate_bound alone bounds the first batch",
    "logging-steps": "every step is logged",
    "processes": "it is one of qarl train and qarl plan",
    "use-vllm": "vLLM always samples",
    "zero-stage": "several processes share masters, gradients and moments without it; omit it",
}
"""Option of another trainer or of an earlier version, dashed → why there is no such field."""


def flag_of(path: str) -> str:
    """Return a field's option without dashes: its short flag, or its path if it has none."""
    return next((flag for flag, field in FLAGS.items() if field == path), path)


def shown(path: str) -> str:
    """Return a field's name for messages: "learner.optimizer.lr (--lr)", or its path if it has no
    short flag.
    """
    flag = flag_of(path)
    return path if flag == path else f"{path} (--{flag})"
