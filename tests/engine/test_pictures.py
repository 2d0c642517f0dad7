"""Prompts with pictures: log-probs against sampler and transformers, and a whole run."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from qarl.configs.schema.rollout import RolloutConfig
from qarl.configs.schema.task import TaskConfig
from qarl.learner.batching import Batch, make_batch
from qarl.learner.logprobs import token_logprobs
from qarl.quant.graph.packing import PictureRows, Sequences
from qarl.quant.model.low_bit_model import LowBitModel
from qarl.rollout.engine import EngineError
from qarl.rollout.picture_processors import load_processor
from qarl.rollout.types import Group, Prompt, Sampling
from qarl.rollout.vllm.engine import VllmEngine
from qarl.run.picture_check import check_pictures, require_right_pictures, whole_inputs
from qarl.run.prompts import open_prompter
from qarl.sync.audit import AuditError
from qarl.tasks import Problem
from qarl.tasks.base import PICTURE, Message, Picture
from tests.support.engines import disturb, make_model, start_engine
from tests.support.picture_models import PICTURE_FAMILIES, drawn, write_picture_model
from tests.support.profiles import thorough
from tests.support.runs import SMALL, lines, succeeded

pytestmark = pytest.mark.slow
NEW = 24
"""Tokens of a completion."""
FEW = ("idefics3", "qwen2_5_vl", "qwen3_vl_moe", "qwen3_5_moe", "gemma3", "lfm2_vl", "mistral3")
"""Families of every run; the others, whose engine differs little, are in `make test-thorough`."""
BOTH_DIRECTIONS = ("gemma3", "gemma4")
"""Families in which a picture's tokens see all of the picture."""
DELTA_NETS = ("qwen3_5", "qwen3_5_moe")
"""Families whose layers vLLM computes in bfloat16 alone."""


@pytest.fixture(scope="module", params=PICTURE_FAMILIES if thorough() else FEW)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny random model of a family that takes pictures."""
    folder = tmp_path_factory.mktemp("model")
    write_picture_model(folder, family=request.param)
    return folder


def most_pictures(folder: Path) -> int:
    """Return the number of pictures in a test's longest prompt."""
    return 1 if folder_family(folder) == "llava_onevision" else 2


def picture_token(folder: Path) -> int:
    """Return the number of the token that transformers' model takes for a part of a picture."""
    settings = json.loads((folder / "config.json").read_text())
    return settings.get("image_token_id", settings.get("image_token_index"))


def folder_family(folder: Path) -> str:
    """Return the model type of a folder's model."""
    return json.loads((folder / "config.json").read_text())["model_type"]


@pytest.mark.parametrize("folder", ["llava_onevision"], indirect=True)
def test_several_pictures_that_vllm_arranges_otherwise_are_refused(folder: Path, tmp_path: Path):
    """Contract: transformers leaves out the tiles of LLaVA-OneVision's pictures if there are
    several in a prompt, and vLLM does not.
    """
    model = make_model(folder, "bf16")
    engine = start_engine(model, folder, tmp_path / "start", pictures=2, max_prompt_tokens=512)
    with pytest.raises(EngineError, match=r"with 2 pictures, .*: set rollout.pictures to 1"):
        engine.generate(prompts_of(folder, (2,), seed=0), Sampling(1, 4))
    engine.close()


def prompts_of(folder: Path, numbers: tuple[int, ...], seed: int) -> list[Prompt]:
    """Return prompts with so many pictures of drawn sizes, and texts of drawn lengths.

    The last prompt's pictures are in the second turn of a conversation.
    """
    maker = open_prompter(
        folder, RolloutConfig(pictures=max(numbers), max_prompt_tokens=512), TaskConfig()
    )
    generator = np.random.default_rng(seed)
    prompts = []
    for number, count in enumerate(numbers):
        sizes = generator.integers(8, 150, (count, 2)).tolist()
        pictures = tuple(Picture.of(drawn(generator, *size)) for size in sizes)
        question = "how many " * int(generator.integers(1, 12))
        turns: tuple[Message, ...] = ()
        if number and number == len(numbers) - 1:
            asked: Message = {"role": "user", "content": f"{PICTURE * count} {question}"}
            turns = (
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": "yes"},
                asked,
            )
        problem = Problem(str(number), question, "", pictures=pictures, messages=turns)
        prompts.append(maker.prompt(problem))
    return prompts


def late_picture(folder: Path) -> Prompt:
    """Return a prompt whose picture comes after 80 words."""
    maker = open_prompter(folder, RolloutConfig(pictures=1, max_prompt_tokens=512), TaskConfig())
    picture = Picture.of(drawn(np.random.default_rng(0), 40, 40))
    turn = {"role": "user", "content": "how many " * 40 + PICTURE}
    return maker.prompt(Problem("late", "how many", "", pictures=(picture,), messages=(turn,)))


def sampled(engine: VllmEngine, prompts: list[Prompt], samples: int, seed: int) -> Batch:
    """Return a batch of completions of each prompt."""
    completions = engine.generate(prompts, Sampling(samples, NEW, seed=seed, ignore_end=True))
    groups = [
        Group(prompt, tuple(answers), tuple(map(float, range(samples))))
        for prompt, answers in zip(prompts, completions, strict=True)
    ]
    return make_batch(groups)


def differences(model: LowBitModel, batch: Batch, packed: Any = None) -> torch.Tensor:
    """Return |Δ log p| of every sampled token, fp32 [n]."""
    with torch.no_grad():
        logprobs, _ = token_logprobs(
            model, batch.tokens, batch.response_mask, packed=packed, pictures=batch.pictures
        )
    return (logprobs - batch.sampler_logprobs).abs()[batch.response_mask]


def without(batch: Batch, *fields: str) -> Batch:
    """Return the batch without these fields of its pictures."""
    return Batch(**{**vars(batch), **{f"picture_{field}": None for field in fields}})


def test_sampled_tokens_have_the_learners_log_probs_to_the_last_bit(folder: Path, tmp_path: Path):
    """Contract: at drawn sizes of pictures and lengths of prompts, padded, packed and with shared
    prompts, for some rows alone, after a publish, and with the engine's own layers. Prompts of text
    stand beside. Blind spot: one tiny model; float32 and GPUs.
    """
    model = make_model(folder, "w8a8")
    engine = start_engine(
        model, folder, tmp_path / "start", pictures=2, max_prompt_tokens=512, max_new_tokens=NEW
    )
    most = most_pictures(folder)
    encoded: list[int] = []
    tower = engine._tower
    assert tower is not None
    encode = tower._encode

    def spy(**arguments: Any) -> Any:
        outputs = encode(**arguments)
        encoded.append(len(outputs))
        return outputs

    tower._encode = spy
    prompts = prompts_of(folder, (1, most, 0, 1), seed=0)
    batch = sampled(engine, prompts, 3, seed=0)
    assert encoded == [1] * (2 + most), "every picture once, and alone"
    for packed in (None, batch.packed(), batch.packed(share_prompts=True)):
        assert not differences(model, batch, packed).any()
    rows = batch.rows(torch.tensor([10, 4, 0]))
    assert not differences(model, rows, rows.packed()).any()
    # values that pictures, or their places on three axes, do not reach would pass all this
    assert differences(model, without(batch, "rows", "index", "positions", "sees")).mean() > 0.1
    if batch.picture_positions is not None:
        assert differences(model, without(batch, "positions")).mean() > 0.01
    assert (batch.picture_sees is not None) == (folder_family(folder) in BOTH_DIRECTIONS)
    if batch.picture_sees is not None:
        assert differences(model, without(batch, "sees")).mean() > 0.01

    disturb(model, 1)
    model.refresh()
    report = engine.load(model.low_bit_tensors(), 1)
    assert (report.unconsumed, report.missing) == ((), ())
    model.multiply_with(engine.shared_layers())
    batch = sampled(engine, prompts, 2, seed=1)
    assert not differences(model, batch, batch.packed(share_prompts=True)).any()
    logprobs, _ = token_logprobs(
        model, batch.tokens, batch.response_mask, packed=batch.packed(), pictures=batch.pictures
    )
    logprobs.sum().backward()
    assert all(master.grad is not None for master in model.masters.values())
    names = [layer.name for layer in engine.layer_reports()]
    assert names and not any("vision" in name or "connector" in name for name in names)
    engine.close()


def test_the_engine_and_transformers_see_the_same_pictures(folder: Path, tmp_path: Path):
    """Contract: float32 log-probs of transformers' whole model, tower included, up to rounding.

    Learner and engine share what the tower made, and where its rows stand, so their equality says
    nothing about them.
    """
    if folder_family(folder) in DELTA_NETS:
        pytest.skip("vLLM's kernels of gated delta nets have bfloat16 alone; see below")
    model = make_model(folder, "bf16", "float32")
    engine = start_engine(
        model,
        folder,
        tmp_path / "start",
        "float32",
        pictures=2,
        max_prompt_tokens=512,
        max_new_tokens=NEW,
    )
    # 4 × 4 tokens, 3 × 3 and 4 × 4 of Qwen's
    prompts = prompts_of(folder, (1, most_pictures(folder)), seed=5)
    batch = sampled(engine, prompts, 1, seed=0)
    engine.close()
    whole, processor = whole_model(folder)
    for row, prompt in enumerate(prompts):
        tokens = batch.tokens[row, : batch.length[row]][None]
        # transformers takes a sampled token for pictures for another picture
        later = (tokens[0] == picture_token(folder)).nonzero().flatten()
        later = later[later >= len(prompt.token_ids)].tolist()
        tokens = tokens[:, : min(later, default=tokens.shape[1])]
        assert tokens.shape[1] > len(prompt.token_ids) + 2
        logits = whole_logits(whole, processor, prompt, tokens)[:-1]
        expected = logits.log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0]
        mask = batch.response_mask[row, : len(expected)]
        actual = batch.sampler_logprobs[row, : len(expected)]
        torch.testing.assert_close(actual[mask], expected[mask], rtol=0, atol=2e-4)


@pytest.mark.parametrize("folder", DELTA_NETS if thorough() else DELTA_NETS[1:], indirect=True)
def test_delta_nets_see_the_pictures_where_transformers_do(folder: Path, tmp_path: Path):
    """Contract: in float32, without the kernels that have bfloat16 alone, vLLM's language model has
    transformers' log-probs of prompts, if it is given transformers' outputs of the tower and the
    engine's positions. The engine's tower has these outputs up to bfloat16's rounding.
    """
    model = make_model(folder, "bf16")
    engine = start_engine(model, folder, tmp_path / "start", pictures=2, max_prompt_tokens=512)
    prompts = prompts_of(folder, (1, 2), seed=5)
    assert engine._tower is not None
    embedded = [engine._tower.embedded(prompt) for prompt in prompts]
    engine.close()
    whole, processor = whole_model(folder)
    for prompt, pictures in zip(prompts, embedded, strict=True):
        tokens = torch.tensor(prompt.token_ids)
        expected = whole_logits(whole, processor, prompt, tokens[None])
        with torch.no_grad():
            inputs = whole_inputs(whole, processor, prompt)
            pixels = {name: inputs[name] for name in ("pixel_values", "image_grid_thw")}
            outputs = whole.model.get_image_features(**pixels)
        rows = torch.cat(list(outputs.pooler_output))
        torch.testing.assert_close(pictures.rows.float(), rows, rtol=0, atol=0.05)
        index = torch.full_like(tokens, -1)
        index[pictures.places] = torch.arange(len(rows))
        length = (len(tokens),)
        in_row = PictureRows(rows, index, pictures.positions)
        with torch.no_grad(), model.fp32_graph() as graph:
            hidden = graph.hidden(tokens, Sequences(length, length, None, length), pictures=in_row)
            actual = graph.logits(hidden)
        torch.testing.assert_close(
            actual.log_softmax(-1), expected.log_softmax(-1), rtol=0, atol=2e-4
        )


def whole_model(folder: Path) -> tuple[Any, Any]:
    """Return transformers' whole model in float32, and the processor."""
    loader: Any = AutoModelForImageTextToText
    return loader.from_pretrained(folder, dtype=torch.float32).eval(), load_processor(folder)


def whole_logits(whole: Any, processor: Any, prompt: Prompt, tokens: torch.Tensor) -> torch.Tensor:
    """Return transformers' logits [T, V] of tokens [1, T] that begin with a prompt's."""
    inputs = whole_inputs(whole, processor, prompt)
    del inputs["input_ids"]
    for name, kinds in inputs.items():
        if name.endswith("token_type_ids"):  # sampled tokens are text
            more = tokens.shape[1] - kinds.shape[1]
            inputs[name] = torch.nn.functional.pad(kinds, (0, more))
    with torch.no_grad():
        return whole(input_ids=tokens, **inputs).logits[0]


@pytest.mark.parametrize("folder", ["idefics3"], indirect=True)
def test_pictures_for_an_engine_of_text_are_refused(folder: Path, tmp_path: Path):
    model = make_model(folder, "bf16")
    engine = start_engine(model, folder, tmp_path / "start", max_prompt_tokens=512)
    with pytest.raises(EngineError, match="was started without the model's part for them"):
        engine.generate(prompts_of(folder, (1,), seed=0), Sampling(1, 4))
    engine.close()


@pytest.mark.parametrize("folder", ["gemma3"], indirect=True)
def test_the_comparison_before_a_run_finds_what_the_engine_gets_wrong(folder: Path, tmp_path: Path):
    """Contract: another output of the tower, other places, and attention that reads pictures from
    left to right are refused; the engine's own are not. So is a picture beyond a layer's window.
    """
    model = make_model(folder, "w8a8")
    engine = start_engine(model, folder, tmp_path / "start", pictures=2, max_prompt_tokens=512)
    (prompt,) = prompts_of(folder, (2,), seed=0)
    ((answer,),) = engine.generate([prompt], Sampling(1, 1, seed=0))
    with pytest.raises(EngineError, match=r"ends at its token \d+, .* have windows of 64 tokens"):
        engine.generate([late_picture(folder)], Sampling(1, 1))
    engine.close()
    right = answer.pictures
    assert right is not None and right.sees is not None
    checked = check_pictures(model, folder, prompt, right)
    require_right_pictures(checked)
    assert checked.tokens == len(prompt.token_ids) and not checked.unknown
    for wrong in (
        {"rows": 1.5 * right.rows},
        {"places": right.places.roll(1)},
        {"sees": None},
    ):
        with pytest.raises(AuditError, match=r"^pictures differ from transformers'"):
            require_right_pictures(check_pictures(model, folder, prompt, replace(right, **wrong)))


@pytest.mark.parametrize("folder", ["qwen3_vl_moe", "gemma3"], indirect=True)
def test_a_run_with_pictures_is_exact_and_its_export_takes_pictures(folder: Path, tmp_path: Path):
    """Contract: two steps of `qarl train`, one before and one after it is resumed; evaluation, and
    evaluation of the export in a fresh engine.

    A mixture of Qwen3-VL, because its processor is ours, its pictures are placed on three axes,
    they reach deeper layers, and transformers has no class for its language model alone; and Gemma
    3, whose pictures are read in both directions.
    """
    run = tmp_path / "run"
    settings = json.loads((folder / "config.json").read_text())
    flags: list[str | Path] = [*SMALL, "--model", folder, "--task", "drawn_shapes"]
    flags += ["--reward", "tests.support.rewards:reward", "--rollout.pictures", "1"]
    flags += ["--rollout.max_prompt_tokens", "128", "--scheme", "w8a8", "--eval.problems", "4"]
    flags += ["--checkpoint-every", "1", "--prompts", "2", "--rollout.max_new_tokens", "8"]
    begun = succeeded("train", *flags, "--steps", "1", "--output", run)
    done = succeeded("train", "--resume", run, "--steps", "2")
    assert "of the exported checkpoint in a fresh engine" in done.stdout
    assert "pictures agree with transformers'" in begun.stdout
    metrics = lines(run)
    assert [line["learn/mismatch/equal"] for line in metrics] == [1, 1]
    assert len({line["digest"] for line in metrics}) == 2
    exported = json.loads((run / "export" / "config.json").read_text())
    assert exported["model_type"] == settings["model_type"]
