"""What to change, in the options of the frameworks that have one."""

_OPTIONS = {
    "temperature": (
        "divide the trainer's logits by the sampling temperature, and have vLLM return"
        " logprobs_mode=processed_logprobs",
        {
            "TRL": "GRPOConfig(temperature=…)",
            "verl": "actor_rollout_ref.rollout.temperature",
            "prime-rl": "orchestrator.sampling.temperature",
            "NeMo-RL": "policy.generation.temperature",
        },
    ),
    "truncation": (
        "sample with top_p 1 and top_k 0 (vLLM: -1), or renormalize the trainer over the same set",
        {
            "TRL": "GRPOConfig(top_p=1.0, top_k=0)",
            "verl": "actor_rollout_ref.rollout.top_p=1.0 and .top_k=-1",
            "NeMo-RL": "policy.generation.top_p=1.0 and .top_k=null",
        },
    ),
    "stale": (
        "publish before sampling, bound the staleness, or correct by importance weights",
        {
            "TRL": "GRPOConfig(vllm_importance_sampling_correction=True)",
            "verl": "actor_rollout_ref.rollout.calculate_log_probs=True with"
            " algorithm.rollout_correction",
            "prime-rl": "max_async_level",
            "NeMo-RL": "grpo.async_grpo.max_trajectory_age_steps,"
            " loss_fn.use_importance_sampling_correction",
        },
    ),
    "scheme": (
        "train through the codes that the engine multiplies; compare both sides with `qarl verify"
        " weights`, or correct by importance weights",
        {
            "TRL": "vllm_importance_sampling_correction, or qarl.integrations.trl",
            "verl": "algorithm.rollout_correction, or qarl.integrations.verl",
            "NeMo-RL": "loss_fn.use_importance_sampling_correction",
        },
    ),
}


def remedy(cause: str) -> str:
    """Return what to change for a cause of this name, with the options of frameworks."""
    text, options = _OPTIONS[cause]
    return f"{text} ({'; '.join(f'{name}: {option}' for name, option in options.items())})"
