"""Real vLLM servers of two tensor-parallel ranks, and of three and four."""

import base64
from pathlib import Path

import pytest
import torch

from qarl.configs.schema.rollout import RolloutConfig
from qarl.quant.runtime.libraries import ON_CPU
from qarl.rollout.engine import EngineError
from qarl.rollout.servers.engine import ServerEngine
from qarl.rollout.servers.vllm.answers import read_logprobs, scoring_request
from qarl.rollout.servers.vllm.start import free_ports, start_replicas, stop_replicas
from qarl.rollout.types import Prompt, Sampling
from qarl.rollout.vllm.options import VllmOptions
from qarl.sync.export import export_checkpoint
from qarl.sync.floor import FixedSequences
from qarl.sync.publisher import Publisher
from qarl.verify.agreement import rounds_to
from tests.support import Policies
from tests.support.engines import SEQUENCES, disturb, make_model
from tests.support.kernels import no_cuda
from tests.support.profiles import thorough

ROLLOUT = RolloutConfig(
    servers=1,
    max_prompt_tokens=64,
    max_new_tokens=64,
    max_num_seqs=16,
    server_seconds=60,
    tensor_parallel_size=2,
)


def columns_of_ranks(engine: ServerEngine, layer: str, count: int) -> list[torch.Tensor]:
    """Return the first columns of what each rank multiplies by, in the compute dtype."""
    (server,) = engine._replicas.present()
    answers = server.call("qarl_weight_part", layer=layer, kind="product", start=0, count=count)
    return [
        torch.frombuffer(bytearray(base64.b64decode(part["data"])), dtype=torch.bfloat16).view(
            part["shape"]
        )
        for part in engine._wait(answers)
    ]


def scores_when_fresh(engine: ServerEngine) -> list[list[float]]:
    """Return the log-probs of `SEQUENCES` by the weights that the server was started on."""
    (server,) = engine._replicas.present()
    scores = []
    for sequence in SEQUENCES:
        answer = engine._wait(server.generate(scoring_request(sequence, "fresh")))
        label = answer["choices"][0]["weight_versions"][0]["version"]
        scores.append(read_logprobs(answer, sequence, server.url, {label: 0}))
    return scores


@no_cuda
@pytest.mark.slow
def test_two_ranks_sample_by_the_learners_log_probs(
    random_policy: Policies, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Contract: log-probs of fixed sequences and of sampled tokens equal the learner's to the last
    bit, and each rank multiplies by its own columns of what was published. Published again, the
    weights that the server was started on give the log-probs that it had when it was fresh. A run
    that counts other ranks is refused.

    Blind spot: mixtures, whose products tests/quant/test_ranks.py compares.
    """
    monkeypatch.setenv(ON_CPU, "1")
    model = make_model(random_policy(True), "w8a8", ranks=2)
    start = tmp_path / "start"
    export_checkpoint(model, random_policy(True), start)
    masters = {name: master.detach().clone() for name, master in model.masters.items()}
    options = VllmOptions(ROLLOUT)
    replicas = start_replicas(start, options, free_ports(1), "key", tmp_path, seconds=240)
    try:
        urls = [replica.url for replica in replicas]
        single = VllmOptions(ROLLOUT.model_copy(update={"tensor_parallel_size": 1}))
        with pytest.raises(
            EngineError, match=r"has 2 ranks, and rollout.tensor_parallel_size is 1"
        ):
            ServerEngine(urls, "key", tmp_path / "versions", start, single, "one")
        engine = ServerEngine(urls, "key", tmp_path / "versions", start, options, "one")
        fresh = scores_when_fresh(engine)
        publisher = Publisher(model, engine, SEQUENCES, bound=1e-9, canary_every=1)
        disturb(model, 0)
        first = publisher.publish(1)
        assert first.canary is not None
        assert first.canary.max_abs == 0
        prompts = [Prompt(str(n), "", tuple(tokens)) for n, tokens in enumerate(SEQUENCES)]
        completions = engine.generate(prompts, Sampling(samples=2, max_new_tokens=12, seed=3))
        for prompt, group in zip(prompts, completions, strict=True):
            for completion in group:
                fixed = FixedSequences(model, [[*prompt.token_ids, *completion.token_ids]])
                learner = fixed.logprobs()[0, -len(completion.token_ids) :]
                assert torch.equal(learner, torch.tensor(completion.logprobs))
        for layer in ("self_attn.o_proj", "mlp.down_proj"):
            name = f"model.layers.1.{layer}"
            codes = model.linears[name].codes()
            ranks = columns_of_ranks(engine, name, codes.shape[1] // 2)
            for rank, columns in enumerate(ranks):
                expected = codes.columns(rank, 2).dequantized()
                assert rounds_to(expected, columns, toward_zero=True)

        with torch.no_grad():
            for name, master in model.masters.items():
                master.copy_(masters[name])
        model.refresh()
        publisher.publish(2)
        assert engine.logprobs(SEQUENCES) == fresh
        engine.close()
    finally:
        stop_replicas(replicas)


@no_cuda
@pytest.mark.slow
@pytest.mark.skipif(not thorough(), reason="starts three and four ranks: make test-thorough")
@pytest.mark.parametrize("ranks", [3, 4])
def test_more_than_two_ranks_have_the_learners_log_probs(
    ranks: int,
    real_model: Path,
    random_policy: Policies,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """Contract: of a real model, whose 9 heads three ranks divide, and of a random one with 4,
    log-probs of fixed sequences equal the learner's to the last bit. vLLM's own sums of more than
    two ranks depend on the rank or on what is beside a token.
    """
    monkeypatch.setenv(ON_CPU, "1")
    folder = real_model if ranks == 3 else random_policy(True)
    model = make_model(folder, "w8a8", ranks=ranks)
    start = tmp_path / "start"
    export_checkpoint(model, folder, start)
    update = {"tensor_parallel_size": ranks, "server_seconds": 600}
    options = VllmOptions(ROLLOUT.model_copy(update=update))
    replicas = start_replicas(start, options, free_ports(1), "key", tmp_path, seconds=600)
    try:
        engine = ServerEngine(
            [replicas[0].url], "key", tmp_path / "versions", start, options, "one"
        )
        publish = Publisher(model, engine, SEQUENCES, bound=1e-9, canary_every=1).publish(1)
        assert publish.canary is not None
        assert publish.canary.max_abs == 0
        engine.close()
    finally:
        stop_replicas(replicas)
