"""Train with TRL on a vLLM server of your own, and write a dump for `qarl verify`.

    VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server --model MODEL \
        --logprobs-mode processed_logprobs --worker-extension-cls qarl.verify.HeldWeights
    python examples/trl_verify.py MODEL http://127.0.0.1:8000
    qarl verify logprobs dump.jsonl
    qarl verify weights trained http://127.0.0.1:8000

TRL's trainer, TRL's loss and vLLM's own reload are used; of QaRL nothing is but `qarl verify`.
`--skip-layer NAME` leaves a layer out of every reload, to see that this is found.
"""

import argparse
import json
import urllib.request
from pathlib import Path
from typing import Any

from datasets import Dataset
from safetensors.torch import load_file, save_file
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore

PROMPTS = [[{"role": "user", "content": f"{n} + {n} ="}] for n in range(1, 9)]


def post(url: str, body: dict[str, Any]) -> Any:
    """Return the server's answer to a request."""
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


def distinct_characters(completions: list[Any], **_: Any) -> list[float]:
    """Return a reward for every completion."""
    return [float(len(set(completion[0]["content"]))) for completion in completions]


class DumpingTrainer(GRPOTrainer):
    """TRL's trainer, which writes each batch as it is scored to dump.jsonl."""

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        batch = super()._generate_and_score_completions(inputs)
        with Path("dump.jsonl").open("a") as file:
            for n, mask in enumerate(batch["completion_mask"].bool()):
                row = {
                    "prompt_ids": batch["prompt_ids"][n][batch["prompt_mask"][n].bool()].tolist(),
                    "completion_ids": batch["completion_ids"][n][mask].tolist(),
                    "sampler_logprobs": batch["sampling_per_token_logps"][n][mask].tolist(),
                    "trainer_logprobs": batch["old_per_token_logps"][n][mask].tolist(),
                    "advantage": batch["advantages"][n].item(),
                    "temperature": self.temperature,
                    "trainer_version": self.state.global_step,
                    "age": 0,
                }
                file.write(json.dumps(row) + "\n")
        return batch


class Rollouts:
    """TRL's `rollout_func`: reload the server if the weights moved, then sample from it.

    Args:
        url: Base URL of the server.
        skipped: Layer that is left out of reloads; "" if none is.
    """

    def __init__(self, url: str, skipped: str):
        self._url = url
        self._skipped = skipped
        self._loaded = 0

    def __call__(self, prompts: list[Any], trainer: GRPOTrainer) -> dict[str, Any]:
        if trainer.state.global_step != self._loaded:
            self.reload(trainer)
        tokenizer = trainer.processing_class
        prompt_ids = [
            tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
            for prompt in prompts
        ]
        answer = post(
            f"{self._url}/v1/completions",
            {
                "model": trainer.model.name_or_path,
                "prompt": prompt_ids,
                "max_tokens": trainer.max_completion_length,
                "temperature": trainer.temperature,
                "logprobs": 0,
                "return_token_ids": True,
            },
        )
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": [choice["token_ids"] for choice in choices],
            "logprobs": [choice["logprobs"]["token_logprobs"] for choice in choices],
        }

    def reload(self, trainer: GRPOTrainer) -> None:
        """Have the server load the trainer's present weights, by vLLM's own reload."""
        folder = Path("published").resolve()
        trainer.model.save_pretrained(folder)
        if self._skipped:
            file = folder / "model.safetensors"
            tensors = load_file(file)
            save_file({n: t for n, t in tensors.items() if self._skipped not in n}, file)
        url = f"{self._url}/collective_rpc"
        post(url, {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})
        post_reset = urllib.request.Request(f"{self._url}/reset_prefix_cache", method="POST")
        urllib.request.urlopen(post_reset, timeout=120).close()
        self._loaded = trainer.state.global_step


def main() -> None:
    """Train, and save what was trained to the folder `trained`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("url")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--skip-layer", default="")
    known = parser.parse_args()
    args = GRPOConfig(
        "trl-run",
        per_device_train_batch_size=8,
        num_generations=4,
        num_iterations=2,  # so that TRL scores every batch before its first update
        max_completion_length=32,
        learning_rate=1e-3,
        max_steps=2 * known.steps,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
    )
    rollouts = Rollouts(known.url.rstrip("/"), known.skip_layer)
    trainer = DumpingTrainer(
        known.model,
        distinct_characters,
        args,
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        rollout_func=rollouts,
    )
    trainer.train()
    rollouts.reload(trainer)  # the last update, too, before the two are compared
    trainer.save_model("trained")


if __name__ == "__main__":
    main()
