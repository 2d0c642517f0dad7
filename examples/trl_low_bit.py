"""TRL's GRPOTrainer on a low-bit policy whose learner and sampler agree to the last bit.

    pip install "qarl-train[cpu,trl]"
    python examples/trl_low_bit.py MODEL

MODEL is a checkpoint folder or a name of the hub. The policy that was sampled from is written to
the folder `export`, and what vLLM loads from there is compared with TRL's masters by `qarl verify`.
"""

import argparse
from typing import Any

from datasets import Dataset
from trl import GRPOConfig  # pyright: ignore

import qarl
from qarl.integrations.trl import LowBitGRPOTrainer

PROMPTS = [[{"role": "user", "content": f"{n} + {n} ="}] for n in range(1, 9)]


def distinct_characters(completions: list[Any], **_: Any) -> list[float]:
    """Return a reward for every completion."""
    return [float(len(set(completion[0]["content"]))) for completion in completions]


def main() -> None:
    """Train, print TRL's own measure of the mismatch, and export."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--scheme", default="w4a16")
    parser.add_argument("--steps", type=int, default=2)
    known = parser.parse_args()
    args = GRPOConfig(
        "trl-run",
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=16,
        learning_rate=1e-3,
        max_steps=known.steps,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        bf16=False,
    )
    trainer = LowBitGRPOTrainer(
        model=qarl.align(known.model, known.scheme),
        reward_funcs=distinct_characters,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
    )
    trainer.train()
    for log in trainer.state.log_history:
        if "sampling/sampling_logp_difference/max" in log:
            print("max |Δ log p|", log["sampling/sampling_logp_difference/max"])
    trainer.save_model("masters")
    trainer.policy.export("export")
    trainer.engine.close()
    report = qarl.verify.weights("masters", "export")
    print("\n".join(report.lines()))
    qarl.verify.assert_agreement(report)


if __name__ == "__main__":
    main()
