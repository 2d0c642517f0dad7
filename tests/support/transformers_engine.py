"""A second kind of engine, small and in the process, by transformers."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from qarl.quant.digest import StreamDigest
from qarl.quant.types import LayerReport, LowBitTensor
from qarl.rollout.engine import LoadReport
from qarl.rollout.types import Completion, Prompt, Sampling
from tests.support.tensors import seeded


class TransformersEngine:
    """`SamplingEngine` of an unquantized model that transformers runs, one sequence at a time."""

    running = 0

    def __init__(self, checkpoint: Path, dtype: str):
        self._dtype = getattr(torch, dtype)
        self._model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=self._dtype)
        self._tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint)
        self.weight_version = 0
        TransformersEngine.running += 1

    @torch.no_grad()
    def _logp(self, tokens: Sequence[int]) -> torch.Tensor:
        return (
            self._model(torch.tensor([tokens]))
            .logits[0]
            .log_softmax(
                -1,
                dtype=torch.float32,
            )
        )

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[list[Completion]]:
        return [
            [
                self._sample(p, sampling, 1000 * sampling.seed + 100 * j + k)
                for k in range(sampling.samples)
            ]
            for j, p in enumerate(prompts, sampling.first_prompt)
        ]

    def _sample(self, prompt: Prompt, sampling: Sampling, seed: int) -> Completion:
        generator = seeded(seed % 2**63)
        tokens = list(prompt.token_ids)
        logprobs = []
        while len(logprobs) < sampling.max_new_tokens:
            logp = self._logp(tokens)[-1]
            tokens.append(int(logp.exp().multinomial(1, generator=generator)))
            logprobs.append(float(logp[tokens[-1]]))
        new = tuple(tokens[len(prompt.token_ids) :])
        return Completion(
            new,
            tuple(logprobs),
            self._tokenizer.decode(new),
            self.weight_version,
            "length",
        )

    def sampled_by_step(self, prompts: Sequence[Prompt], sampling: Sampling) -> Iterator[int]:
        for completion in itertools.chain(*self.generate(prompts, sampling)):
            yield from (1 for _ in completion.token_ids)

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        found = []
        for sequence in sequences:
            logp = self._logp(list(sequence))
            targets = torch.tensor(sequence[1:])
            found.append(logp.gather(-1, targets[:, None])[:, 0].tolist())
        return found

    def logprobs_of_each(
        self,
        sequences: Sequence[Sequence[int]],
    ) -> list[list[list[float]]]:
        return [self.logprobs(sequences)]

    def shared_layers(self) -> None:
        return None

    def layer_reports(self) -> list[LayerReport]:
        linear = [
            name for name, module in self._model.named_modules() if isinstance(module, nn.Linear)
        ]
        return [LayerReport(name, "bf16", None, str(self._dtype), "torch") for name in linear]

    @torch.no_grad()
    def load(self, stream: Iterable[LowBitTensor], version: int) -> LoadReport:
        digest = StreamDigest()
        missing = set(dict(self._model.named_parameters()))
        unconsumed = []
        for item in stream:
            digest.update(item)
            if item.name in missing:
                self._model.get_parameter(item.name).copy_(item.tensor)
                missing.remove(item.name)
            else:
                unconsumed.append(item.name)
        self.weight_version = version
        return LoadReport(digest.hexdigest(), tuple(unconsumed), tuple(sorted(missing)))

    def close(self) -> None:
        del self._model
        TransformersEngine.running -= 1


def use_transformers_engine(
    monkeypatch: pytest.MonkeyPatch, kind: Any = TransformersEngine
) -> None:
    """Let `open_engine` choose this engine."""
    monkeypatch.setattr(
        "qarl.rollout.open._start",
        lambda checkpoint, rollout, dtype, *how: kind(checkpoint, dtype),
    )
