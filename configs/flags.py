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


def shown(path: str) -> str:
    """A field as a person would write it: "learner.optimizer.lr (--lr)", or its path where it has no short flag."""
    flag = next((flag for flag, field in FLAGS.items() if field == path and flag != path), None)
    return f"{path} (--{flag})" if flag else path
