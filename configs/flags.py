"""Short flags of the command line for the common fields; every field has its dotted name as well."""

FLAGS = {
    "model": "model", "scheme": "scheme", "scale": "quantization.scale", "init": "quantization.init",
    "layers": "layers", "dtype": "dtype", "task": "task.name", "steps": "steps",
    "seed": "seed", "output": "output", "lr": "learner.optimizer.lr", "optimizer": "learner.optimizer.name",
    "objective": "learner.objective.name", "aligned": "learner.aligned", "kernel": "learner.kernel",
    "master-dtype": "learner.master_dtype", "mini-batches": "learner.mini_batches", "prompts": "rollout.prompts",
    "samples": "rollout.samples", "max-new-tokens": "rollout.max_new_tokens", "reward": "task.reward",
    "eval-every": "eval.every", "checkpoint-every": "checkpoint.every", "record": "record",
    "from-rollouts": "from_rollouts",
}  # fmt: skip
"""Flag → the dotted path of its field."""

ELSEWHERE = {
    "batch-size": "rollout.prompts", "beta": "learner.kl.coefficient", "bf16": "dtype", "dataset": "task.name",
    "eval-steps": "eval.every", "fp16": "dtype", "generation-batch-size": "rollout.prompts",
    "kl-coef": "learner.kl.coefficient", "learning-rate": "learner.optimizer.lr", "lora-r": "learner.lora.rank",
    "lora-target-modules": "learner.lora.targets", "loss-type": "learner.objective.name",
    "max-completion-length": "rollout.max_new_tokens", "max-grad-norm": "learner.optimizer.grad_clip",
    "max-prompt-length": "rollout.max_prompt_tokens", "max-steps": "steps", "model-name-or-path": "model",
    "num-generations": "rollout.samples", "num-iterations": "learner.mini_batches", "num-train-epochs": "steps",
    "output-dir": "output", "per-device-train-batch-size": "rollout.prompts", "report-to": "log",
    "reward-funcs": "task.reward", "save-steps": "checkpoint.every", "scale-rewards": "learner.advantage",
    "temperature": "rollout.temperature", "train-dataset": "task.name",
    "warmup-ratio": "learner.optimizer.warmup_steps", "warmup-steps": "learner.optimizer.warmup_steps",
}  # fmt: skip
"""What other trainers call a field, dashed → its dotted path; for suggestions alone."""


def shown(path: str) -> str:
    """A field as a person would write it: "learner.optimizer.lr (--lr)", or its path where it has no short flag."""
    flag = next((flag for flag, field in FLAGS.items() if field == path and flag != path), None)
    return f"{path} (--{flag})" if flag else path
