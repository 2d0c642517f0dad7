"""`qarl plan`: the formula against arithmetic done by hand, what it decides, refuses and
proposes.
"""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from transformers import CONFIG_MAPPING, Qwen3Config, Qwen3MoeConfig

from qarl.api.runs import agreed
from qarl.cli.main import main
from qarl.configs.errors import ConfigError, SchemeError
from qarl.configs.load import config_file, default_config, load_config
from qarl.configs.schema.lora import LoraConfig
from qarl.configs.schema.run import RunConfig
from qarl.embedded.real_model import REAL_MODEL
from qarl.embedded.recipe import RECIPES, recipe_config
from qarl.planning import choice
from qarl.planning import machine as machines
from qarl.planning.choice import choose, fitting, helping
from qarl.planning.machine import Machine, parse_machine, this_machine
from qarl.planning.memory import GIB, Count, Memory, count_memory
from qarl.planning.plan import changed_config, make_plan
from qarl.planning.shapes import COUNTED, EMBEDDED, NAMED, matrices, shapes_of, sizes_of
from qarl.planning.words import one_line, table
from qarl.preflight.files import check_processes
from qarl.preflight.schemes import check_schemes
from qarl.quant.checkpoint.load import empty_model
from qarl.quant.checkpoint.shapes import plan_layers, weight_shapes
from qarl.quant.model.add_lora import adapted_weights
from qarl.quant.schemes import get_scheme, is_protected
from tests.support.models import PUBLISHED

PAPER = config_file("paper/qwen3-8b-base")
H100 = "0, GPU-aaaa, NVIDIA H100 80GB HBM3, 81559, 81000, 9.0, 580.65.06"


def folder(place: Path, name: str) -> Path:
    model = place / name
    model.mkdir()
    (model / "config.json").write_text(json.dumps(PUBLISHED[name]))
    return model


def config(**overrides: object) -> RunConfig:
    """Return the paper's configuration with some fields changed; `__` in a keyword stands for a
    dot.
    """
    return load_config(
        PAPER, {key.replace("__", "."): str(value) for key, value in overrides.items()}
    )


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replace the driver's report of GPUs, for an environment whose torch would use them."""
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    monkeypatch.setenv("PATH", str(tool.parent), prepend=":")
    monkeypatch.setattr(machines, "torch_is_for_cpus", lambda: False)
    monkeypatch.setattr(machines, "available_memory", lambda: 2000 * GIB)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def tell(*mebibytes: int | str) -> None:
        rows = [
            H100.replace("0, GPU-a", f"{n}, GPU-{n}").replace("81559", str(m))
            for n, m in enumerate(mebibytes)
        ]
        tool.write_text("#!/bin/sh\n" + "".join(f"echo '{row}'\n" for row in rows))
        tool.chmod(0o755)

    return tell


def test_sizes_come_from_config_json_or_from_what_is_published(tmp_path: Path):
    for name, shapes in NAMED.items():
        if name in PUBLISHED:
            assert sizes_of(str(folder(tmp_path, name))) == (shapes, "its config.json")
    assert (
        sizes_of("Qwen/Qwen3-30B-A3B-Base")[0]
        == sizes_of("qwen3-30b-a3b")[0]
        == NAMED["qwen3-30b-a3b"]
    )
    assert sizes_of("Qwen/Qwen2.5-Math-7B")[0] == NAMED["qwen2.5-7b"]
    billions = [0.6, 1.5, 1.7, 4.0, 7.6, 8.2, 14.8, 30.5, 32.8, 235.1]
    assert sorted(round(shapes.parameters / 1e9, 1) for shapes in NAMED.values()) == billions
    recipes = {
        name: shapes_of(recipe_config(recipe).to_dict(), name) for name, recipe in RECIPES.items()
    }
    assert recipes == {name: shapes for name, shapes in EMBEDDED.items() if name != REAL_MODEL}


def gib(
    name: str,
    processes: int,
    device: str = "cuda",
    **overrides: object,
) -> dict[str, float]:
    memory = count_memory(NAMED[name], config(**overrides), device, processes)
    return {name: round(count / GIB, 1) for name, count in bytes_of(memory).items()}


def bytes_of(memory: Memory) -> dict[str, int]:
    return {part.name: part.bytes for part in memory.parts}


def test_parts_are_those_of_arithmetic_by_hand():
    """fp32 masters and gradients, Muon's one moment of matrices and AdamW's two of the rest; codes,
    output head and embedding; shared by 8. Of 1.7B a layer keeps 70 KiB a token: C = Q = 2048, K
    = 1024, I = 6144, in bytes 4 C of what norms are of, 4 C of that as multiplied, 2 (Q + 2 K) and
    2 (Q + K) of queries, keys and values, 2 Q of attention's output, 6 I of the MLP; a checkpointed
    layer 4 C: a branch and the residual.
    """
    small = gib(
        "qwen3-1.7b",
        1,
        learner__gradient_checkpointing="false",
        learner__micro_batch_tokens=18432,
    )
    assert small["masters"] == 6.4
    assert small["gradients"] == 6.4
    assert small["moments"] == 7.6
    assert small["codes"] == pytest.approx(0.7 + 0.6 + 0.6, abs=0.1)
    assert small["activations"] == pytest.approx(28 * 18432 * 70 * 1024 / GIB, rel=0.01)
    assert "kernel layout" not in small
    # 2 bytes of 1.41B and of the head
    assert gib("qwen3-1.7b", 1, learner__kernel="reference")["kernel layout"] == 3.2
    calibrated = {
        "quantization__scale": "kept",
        "quantization__init": "gptq",
        "learner__aligned": "false",
    }
    assert gib("qwen3-1.7b", 1, **calibrated)["moves"] == 5.2  # 4 bytes of 1.409B
    large = gib("qwen3-8b", 1)
    assert large["masters"] == 30.5
    assert large["gradients"] == 30.5
    assert large["moments"] == 35.1
    assert large["activations"] == pytest.approx(22528 * (36 * 4 * 4096 + 70e3 * 2) / GIB, rel=0.1)
    experts = gib("qwen3-30b-a3b", 8)
    assert experts["masters"] == 14.2
    assert experts["gradients"] == 14.2
    assert experts["moments"] == 14.5
    # CUDA graphs
    assert experts["codes"] == pytest.approx(15.6, abs=0.1) == experts["engine"] - 2.0
    assert experts["workspaces"] == round((8192 + 22528) * 8 * 2 * (2048 + 3 * 768) / GIB, 1)
    half = gib(
        "qwen3-8b",
        1,
        learner__master_dtype="bfloat16",
        learner__optimizer__offload="cpu",
    )
    assert half["masters"] == 15.3
    assert "moments" not in half
    adapted = gib("qwen3-8b", 1, learner__lora__name="lora", learner__optimizer__name="adamw")
    rank_16 = 36 * 16 * (2 * (4096 + 4096) + 2 * (1024 + 4096) + 3 * (4096 + 12288))
    assert adapted["moments"] == round(2 * 4 * rank_16 / GIB, 1)


def test_what_saving_a_checkpoint_takes_by_hand():
    """A checkpoint of shared masters gathers the largest module: embeddings' master and moments,
    two of AdamW's, less gradients of 1/8.
    """
    for name, moments in (("adamw", 2), ("muon", 1)):
        of = Count(
            NAMED["qwen3-1.7b"],
            config(learner__optimizer__name=name),
            "cuda",
            8,
        )
        assert of.saving() == 151936 * 2048 * 4 * (1 + moments) - of.gradients()


def test_another_choice_leaves_the_fields_of_the_one_before():
    before = config(learner__kl__name="k3", learner__kl__coefficient=0.1)
    assert changed_config(before, {"learner.kl.name": "k3"}).learner.kl == before.learner.kl
    assert changed_config(before, {"learner.kl.name": "none"}).learner.kl.name == "none"


def test_a_learner_apart_from_its_servers_has_no_engine_and_may_keep_no_weights():
    """Sampling elsewhere, all that is left of a mixture's 15.7 GiB of codes are a layer's, of 48,
    and what lies outside them: embedding and head in bfloat16, the head once more as it is
    multiplied. Servers that a run starts count.
    """
    apart = {"rollout__servers": "http://a:1"}
    parts = gib("qwen3-30b-a3b", 8, **apart)
    assert not {"engine", "KV cache"} & parts.keys()
    assert parts["kernel layout"] == pytest.approx(14.4 + 0.6, abs=0.2)
    none = gib(
        "qwen3-30b-a3b",
        8,
        **apart,
        learner__keep_codes="false",
        learner__keep_kernel_layout="false",
    )
    head = 151936 * 2048 * 2 / GIB
    assert none["kernel layout"] == pytest.approx(14.4 / 48 + head, abs=0.06)
    assert none["codes"] == pytest.approx(14.4 / 48 + 2 * head, abs=0.06)
    local = [
        count_memory(NAMED["qwen3-1.7b"], config(rollout__servers=n), "cpu", 1) for n in (1, 2)
    ]
    assert bytes_of(local[1])["engine"] == 2 * bytes_of(local[0])["engine"]
    divided = config(rollout__servers=1, rollout__tensor_parallel_size=4)
    ranks = bytes_of(count_memory(NAMED["qwen3-1.7b"], divided, "cpu", 1))
    assert ranks["engine"] == bytes_of(local[0])["engine"], "a fourth in each rank"
    assert ranks["KV cache"] == 4 * bytes_of(local[0])["KV cache"], "each rank has one"
    plan = make_plan(
        config(**apart, model="m"),
        NAMED["qwen3-30b-a3b"],
        "",
        parse_machine("8x48GB"),
        8,
    )
    assert helping(plan)["--learner.keep_kernel_layout false"] == pytest.approx(
        14.4 * 47 / 48 * GIB, rel=0.02
    )


def test_a_process_reads_its_share_into_the_hosts_memory():
    """An eighth, whole embeddings, and 16 experts of a layer three times. A checkpoint of full
    training takes more.
    """
    base = {
        "learner__master_dtype": "bfloat16",
        "learner__lora__name": "lora",
    }
    whole = 2 * 151936 * 4096 + 3 * 16 * 3 * 1536 * 4096
    shapes = NAMED["qwen3-235b-a22b"]
    read = (shapes.parameters // 8 + whole) * 2
    assert (
        count_memory(shapes, config(**base), "cuda", 8).host
        == read
        == pytest.approx(59 * GIB, 0.01)
    )
    assert (
        count_memory(shapes, config(**{**base, "learner__lora__name": "none"}), "cuda", 8).host
        > read
    )


@pytest.mark.parametrize(("offload", "bytes_a_parameter"), [("none", 10), ("cpu", 18)])
def test_a_process_writes_its_share_of_a_checkpoint_from_the_hosts_memory(
    offload: str, bytes_a_parameter: int
):
    """An eighth of masters in bfloat16 and of AdamW's two moments in fp32, which are there a second
    time if they are offloaded.
    """
    shapes = NAMED["qwen3-235b-a22b"]
    full = config(
        learner__master_dtype="bfloat16",
        learner__optimizer__name="adamw",
        learner__optimizer__offload=offload,
    )
    host = count_memory(shapes, full, "cuda", 8).host
    assert host == pytest.approx(bytes_a_parameter * shapes.parameters / 8, abs=8)


def test_layer_rules_and_targets_count_by_name():
    down = 36 * 4096 * 12288
    plain, mixed = (
        gib("qwen3-8b", 1, layers=rule)["codes"] for rule in ("nothing=w8a8", "*.down_proj=bf16")
    )
    assert mixed - plain == pytest.approx(down * (2 - 0.516) / GIB, abs=0.1)
    # fp8's products are in fp32
    on_cpus = partial(gib, "qwen3-8b", 1, device="cpu", scheme="fp8", rollout__servers=1)
    plain, mixed = (
        on_cpus(layers=rule)["kernel layout"] for rule in ("nothing=w8a8", "*.down_proj=bf16")
    )
    assert plain - mixed == pytest.approx(down * (4 - 2) / GIB, abs=0.1)
    lora = partial(gib, "qwen3-8b", 1, learner__lora__name="lora", learner__lora__rank=256)
    q, all_, others = (
        lora(learner__lora__targets=t)["gradients"] for t in ("*.q_proj", "*", "*.qkv_proj")
    )
    assert q < all_ == others, "names of another family stand for all"
    some = lora(learner__lora__targets="*.q_proj,*.w1")["gradients"]
    assert some == all_, "what a name that is not known stands for may be as large"


def test_targets_that_match_no_known_name_are_said():
    fields = {"learner__lora__name": "lora", "learner__lora__targets": "*.q_proj,*.w1"}
    machine = parse_machine("1xH100")
    plan = make_plan(config(**fields), NAMED["qwen3-8b"], "", machine, 1)
    said = "because the plan knows no layer that matches learner.lora.targets '*.w1'"
    assert said in one_line(plan)
    assert said in " ".join(table(plan))
    known = config(**fields | {"learner__lora__targets": "*.q_proj"})
    assert "because" not in one_line(make_plan(known, NAMED["qwen3-8b"], "", machine, 1))


def test_an_error_of_the_plan_itself_is_no_change_that_does_not_apply(
    monkeypatch: pytest.MonkeyPatch,
):
    """Contract: a change that the configuration refuses is left out; a bug is not hidden so."""
    plan = make_plan(config(), NAMED["qwen3-8b"], "", parse_machine("1xH100"), 1)
    refused = choice.Change({"learner.micro_batch_tokens": 0}, 1)
    assert choice._changed(plan, [refused], plan.machine, 1) is None
    monkeypatch.setattr(choice, "make_plan", lambda *_: int("not a number"))
    with pytest.raises(ValueError, match="invalid literal"):
        choice._changed(plan, [], plan.machine, 1)


def test_what_is_open_is_decided_and_what_is_given_is_kept():
    open_ = load_config(None, {"model": "m"})
    shapes = NAMED["qwen3-1.7b"]
    decided = make_plan(open_, shapes, "", parse_machine("1xB200"), 1)
    assert decided.config.learner.gradient_checkpointing is False
    assert decided.fraction <= 0.9
    # all 256 sequences
    assert decided.config.rollout.kv_cache_gib == bytes_of(decided.memory)["KV cache"] / GIB == 56
    small = make_plan(open_, shapes, "", parse_machine("1x48GB"), 1)
    assert small.config.learner.gradient_checkpointing is True
    assert small.fits
    cpu = make_plan(open_, shapes, "", Machine("cpu", "cpu", 1, 400 * GIB), 1)
    assert cpu.config.learner.gradient_checkpointing is False
    assert cpu.config.rollout.kv_cache_gib == 1
    assert cpu.config.learner.compile is False
    assert decided.config.learner.compile == "auto"
    given = load_config(
        None, {"rollout.kv_cache_gib": "7", "learner.gradient_checkpointing": "false"}
    )
    assert make_plan(given, shapes, "", parse_machine("1x24GB"), 1).config == given


def test_every_help_saves_and_the_command_fits(tmp_path: Path):
    for gpus in ("1xH100", "4x80GB", "8x80GB", "4xH200"):
        machine = parse_machine(gpus)
        plan = make_plan(config(model="m"), NAMED["qwen3-30b-a3b"], "", machine, machine.count)
        assert not plan.fits
        assert all(saved > 0 for saved in helping(plan).values())
        works = fitting(plan)
        assert works
        assert all(fits.fits and fits.fraction <= 0.9 for fits, _ in works)
        assert works[-1][0].config.learner.lora.name == "none"


def test_the_command_plans_without_torch_in_80_columns(tmp_path: Path):
    model = folder(tmp_path, "qwen3-30b-a3b")
    code = (
        "import sys; from qarl.cli.main import main; sys.exit(main(sys.argv[1:]) + 9 * ('torch' in"
        " sys.modules))"
    )
    file = tmp_path / "plan.json"
    arguments = [
        "plan",
        "--model",
        str(model),
        "--scheme",
        "w4a16",
        "--gpus",
        "8x80GB",
        "--json",
        str(file),
    ]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "--processes 8" in {line.split(":")[0].strip() for line in lines}
    assert max(len(line) for line in lines if str(tmp_path) not in line) <= 80
    arguments += ["--learner.optimizer.offload", "none"]  # given, and so kept
    arguments += ["--learner.master_dtype", "float32"]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    lines = done.stdout.splitlines()
    assert max(len(line) for line in lines if str(tmp_path) not in line) <= 80
    written = json.loads(file.read_text())
    assert sum(written["parts"].values()) == written["total"] > written["capacity"]
    assert not written["fits"]
    start = next(number for number, line in enumerate(lines) if line.startswith("  qarl train"))
    works = shlex.split(" ".join(line.rstrip("\\") for line in lines[start:]).split("fits ")[0])
    assert main(["plan", "--gpus", "8x80GB", *works[2:]]) == 0


def test_train_is_refused_before_anything_is_loaded(
    driver: Callable[..., None], capsys: pytest.CaptureFixture[str]
):
    driver(81559)
    assert main(["train", "--scheme", "w4a16", "--model", "Qwen/Qwen3-30B-A3B-Base"]) == 2
    said = capsys.readouterr().err
    assert "GiB too much on 1 × NVIDIA H100 80GB HBM3; nothing was loaded" in said
    assert "fits 1 × NVIDIA H100" in said
    assert "--learner.lora.base host" in said
    assert "fits 4 × H200" in said


def test_cpus_refuse_beyond_a_quarter_more_than_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    model = folder(tmp_path, "qwen3-0.6b")
    given = load_config(default_config(str(model)), {"model": str(model)})
    shapes = NAMED["qwen3-0.6b"]
    needed = make_plan(given, shapes, "", Machine("cpu", "cpu", 1, 10**15), 1).memory.total
    for share, refused, fits in (
        (1.3, True, False),
        (1.2, False, False),
        (0.99, False, True),
    ):
        plan = make_plan(given, shapes, "", Machine("cpu", "cpu", 1, int(needed / share)), 1)
        assert (plan.refused, plan.fits) == (refused, fits)
    monkeypatch.setattr(machines, "available_memory", lambda: GIB)
    assert main(["train", "--model", str(model)]) == 2
    assert "GiB too much on this machine's CPUs; nothing was loaded" in capsys.readouterr().err


def test_the_memory_is_what_a_control_group_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    files = {
        "memory.max": "3000\n",
        "memory.current": "2000\n",
        "memory.stat": "anon 5\ninactive_file 700\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(machines, "Path", lambda _: tmp_path)
    assert machines.available_memory() == 1700  # page cache is given up
    (tmp_path / "memory.max").write_text("max\n")
    assert machines.available_memory() > GIB


def test_the_machine_is_what_the_driver_tells(
    driver: Callable[..., None], monkeypatch: pytest.MonkeyPatch
):
    driver(81559)
    found = this_machine()
    assert found.name == "1 × NVIDIA H100 80GB HBM3"
    assert found.device == "cuda"
    assert found.count == 1
    assert (found.memory, found.used) == (81559 * 2**20, 559 * 2**20)
    assert found.host
    driver("[N/A]")
    assert this_machine().memory == 2000 * GIB  # the host's
    driver(81559, 24576)
    assert this_machine().memory == 24576 * 2**20
    assert this_machine().name.startswith("2 GPUs, of which the smallest, NVIDIA H100")
    driver(81559)
    for chosen in ("0", "GPU-0a"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
        assert len(machines.visible_gpus()) == 1
    for chosen, remedy in (
        ("1", "unset it"),
        ("", "unset it"),
        ("MIG-1/2", "slices of GPUs"),
    ):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
        with pytest.raises(
            ConfigError,
            match=f"'{chosen}' names none of this machine's 1 GPUs: {remedy}",
        ):
            this_machine()
    driver(81559, 81559, 81559)
    for chosen, visible in (
        ("2,0", "20"),
        ("1,7,0", "1"),
        ("7,0", ""),
        ("0,-1,1", "0"),
        ("0,,1", "0"),
        ("1,1", ""),
        ("GPU-2, GPU-7, GPU-0", "2"),
        ("GPU-2, GPU-0a", "20"),
        ("GPU-,0", ""),
        ("G", ""),
    ):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
        assert "".join(gpu.index for gpu in machines.visible_gpus()) == visible, chosen
    monkeypatch.setenv("PATH", "")
    assert machines.driver_gpus() == []
    assert this_machine().device == "cpu"


LITERAL = [
    "train",
    "--scheme",
    "w4a16",
    "--model",
    "Qwen/Qwen3-30B-A3B-Base",
    "--dry-run",
]


def test_a_run_takes_all_gpus_and_a_recipe_that_fits(
    driver: Callable[..., None], capsys: pytest.CaptureFixture[str]
):
    """Contract: every choice is said with its reason; what was given is kept; other processes are
    started with what was chosen; what changes the answers or what is trained is not chosen.
    """

    def chosen(
        *gpus: int,
        more: Sequence[str] = (),
    ) -> tuple[list[str], dict[str, Any]]:
        driver(*gpus)
        # 2: the model is on no hub here, which comes last
        assert main([*LITERAL, *more]) in (0, 2)
        out = capsys.readouterr().out
        lines = [
            line.removeprefix("# chosen: ") for line in out.splitlines() if line.startswith("#")
        ]
        return lines, yaml.safe_load(out)

    eight = 8 * [81559]
    said, made = chosen(*eight)
    assert [line.partition(":")[0] for line in said] == [
        "--config recipes/qwen3-30b-a3b-8x80gb",
        "--processes 8",
    ]
    assert made["rollout"]["prompts"] == 256
    said, made = chosen(*eight, more=["--prompts", "12", "--learner.optimizer.offload", "none"])
    assert said[1].startswith("--processes 6: one a GPU; rollout.prompts 12")
    assert made["learner"]["optimizer"]["offload"] == "none"
    said, made = chosen(81559)
    assert len(said) == 1
    assert "does not fit" in said[0]
    assert made["learner"]["lora"]["name"] == "none"
    assert made["rollout"]["max_new_tokens"] == 16384
    choice = choose(config(model="Qwen/Qwen3-8B-Base"), {}, None, None, parse_machine("8x80GB"))
    assert choice.arguments(None) == ["--config", "recipes/qwen3-8b-8x80gb"]
    tiny = choose(
        load_config(config_file("tiny-qwen3"), {}),
        {},
        None,
        None,
        parse_machine("8xH100"),
    )
    assert (tiny.processes, tiny.words) == (1, ())


def test_processes_of_several_machines_choose_as_one(
    driver: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    """There are as many as their launcher says; what the first decides is the run's; those
    started otherwise are refused.
    """
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "32",
        "LOCAL_WORLD_SIZE": "8",
    }.items():
        monkeypatch.setenv(name, value)
    driver(*8 * [81559])
    assert main(LITERAL) in (0, 2)
    (said,) = (line for line in capsys.readouterr().out.splitlines() if "chosen" in line)
    assert said.startswith("# chosen: --config recipes/qwen3-30b-a3b-8x80gb: for this model")
    dense = config(model="Qwen/Qwen3-14B")
    machine = parse_machine("8x80GB")
    one, four = (choose(dense, {}, "small", count, machine, 8) for count in (8, 32))
    assert one.processes == 8
    assert four.processes == 32
    assert {*four.fields} <= {*one.fields}
    assert not choose(dense, {}, "small", 2, machine).fields, (
        "what eight GPUs would take is not chosen for two"
    )
    plan = make_plan(dense, *sizes_of(dense.model), machine, 32, 8)
    assert {fitted.processes for fitted, _ in fitting(plan)} == {32}
    assert helping(plan)
    together: Any = SimpleNamespace(
        all_gather=lambda mine: [dense, mine], run_on_first=lambda work: work()
    )
    with pytest.raises(
        ConfigError,
        match="process 1 was started with seed 1, process 0 with 0; start all",
    ):
        agreed(dense, dense.model_copy(update={"seed": 1}), together)
    assert agreed(dense, dense, together) is dense


def test_a_plan_of_four_machines_has_a_process_on_each_gpu(capsys: pytest.CaptureFixture[str]):
    """Contract: `--gpus 4x8x80GB` divides masters over 32 processes, counts the host of one machine
    and the bytes that a process sends, and proposes torchrun. Processes are equally many on each.
    """
    command = ["plan", "--gpus", "4x8x80GB", "--model", "Qwen/Qwen3-32B", "--scheme", "w4a16"]
    assert main([*command, "--learner.optimizer.offload", "none"]) == 2
    said = capsys.readouterr().out
    assert "on 4 × 8 × 80 GB, 32 processes" in said
    assert "float32, 1/32 of them" in said
    # 31/32 of fp32 gradients of 32.8 billion parameters
    assert re.search(r"^sent +118\.2  in a micro-batch, gradients$", said, re.MULTILINE)
    proposed = re.search(r"torchrun --nnodes 4 --node-rank NODE --master-addr NODE0", said)
    assert proposed
    assert "--processes" not in said[proposed.start() :]
    one, four = (
        make_plan(config(model="Qwen/Qwen3-32B"), *sizes_of("Qwen/Qwen3-32B"), machine, 32, 8)
        for machine in (parse_machine("8x80GB"), parse_machine("4x8x80GB"))
    )
    assert one.memory == four.memory
    assert one.host == four.host
    assert main([*command, "--processes", "30"]) == 2
    assert "--processes 30 is not a multiple of the 4 machines" in capsys.readouterr().err
    for text in ("4x8x", "0x8xH100", "2x4x8xH100", "4x8xtitan"):
        with pytest.raises(ConfigError, match="4x8xH100 is four machines"):
            parse_machine(text)


def test_a_persons_file_is_kept_but_for_what_it_leaves_open(tmp_path: Path):
    file = tmp_path / "mine.yaml"
    file.write_text(
        "model: Qwen/Qwen3-14B\nlearner:\n  master_dtype: float32\n  optimizer:\n    offload:"
        " none\n"
    )
    choice = choose(load_config(file, {}), {}, str(file), None, parse_machine("4x80GB"))
    assert choice.file == str(file)
    assert choice.processes == 4
    kept = {"learner.master_dtype", "learner.optimizer.offload"}
    assert not kept & choice.fields.keys()
    (tmp_path / "config.json").write_text(
        json.dumps({**PUBLISHED["qwen3-30b-a3b"], "mlp_only_layers": [0]})
    )
    uncounted = choose(config(model=str(tmp_path)), {}, None, None, parse_machine("8x80GB"))
    assert (uncounted.processes, uncounted.words) == (8, ("--processes 8: one a GPU",))


RECIPES_ON = {
    "qwen3-0.6b-24gb": "1x24GB",
    "qwen3-1.7b-80gb": "1x80GB",
    "qwen3-4b-80gb": "1x80GB",
    "qwen3-8b-8x80gb": "8x80GB",
    "qwen3-30b-a3b-8x80gb": "8x80GB",
    "qwen3-8b-24gb": "1x24GB",
}
"""The recipe → its machine."""


@pytest.mark.parametrize("name", RECIPES_ON)
def test_recipes_resolve_suit_their_model_and_fit(name: str, capsys: pytest.CaptureFixture[str]):
    """Contract: a dry run accepts the file, rules and adapters suit the model's true dimensions on
    the meta device, its processes suit it, and it fits with a tenth to spare.
    Blind spot: none was run.
    """
    file = f"recipes/{name}"
    machine = parse_machine(RECIPES_ON[name])
    assert f"--gpus {RECIPES_ON[name]}\n" in config_file(file).read_text()
    assert main(["train", "--config", file, "--task", "chain_sum", "--dry-run"]) == 0
    assert "scheme: w4a16" in capsys.readouterr().out
    recipe = load_config(config_file(file), {})
    check_processes(recipe, machine.count)
    size = next(size for size in PUBLISHED if name.startswith(size))
    kind = {"qwen3": Qwen3Config, "qwen3_moe": Qwen3MoeConfig}[PUBLISHED[size]["model_type"]]
    model = empty_model(kind(**PUBLISHED[size]))
    plan_layers(model, get_scheme(recipe.scheme), recipe.layers)
    if isinstance(recipe.learner.lora, LoraConfig):
        assert adapted_weights(weight_shapes(model), model.config.model_type, recipe.learner.lora)
    plan = make_plan(recipe, *sizes_of(recipe.model), machine, machine.count)
    assert plan.shapes.parameters == sum(p.numel() for p in model.parameters() if p.ndim > 1)
    assert plan.fraction <= 0.9, plan.memory


INIT_RECIPES = [
    ("Qwen/Qwen3-0.6B-Base", "1x24GB", "changed for it: nothing"),
    (
        "Qwen/Qwen3-8B-Base",
        "1xH100",
        "changed for it: --learner.lora.name lora --optimizer adamw --lr 1e-05",
    ),
    (
        "Qwen/Qwen3-8B-Base",
        "1x24GB",
        "--learner.lora.name lora --learner.lora.base host --optimizer adamw",
    ),
    (
        "short",
        "1xH100",
        ("changed for it: --scheme w4a16-g32 --rollout.max_prompt_tokens 50 --max-new-tokens 50"),
    ),
    (
        "Qwen/Qwen3-30B-A3B-Base",
        "8xH100",
        "changed for it: --learner.optimizer.offload cpu",
    ),
]


@pytest.mark.parametrize(("model", "gpus", "said"), INIT_RECIPES)
def test_init_writes_a_run_that_fits(model: str, gpus: str, said: str, tmp_path: Path, capsys):
    """Contract: what trains everything comes before adapters, and the file alone plans as it says.
    A model's positions and the columns of its matrices are those of its config.json.
    """
    if model == "short":
        model = str(tmp_path / model)
        Qwen3Config(
            hidden_size=96, intermediate_size=160, max_position_embeddings=100
        ).save_pretrained(model)
    assert main(["init", str(tmp_path / "mine"), "--model", model, "--gpus", gpus]) == 0
    file = tmp_path / "mine" / "run.yaml"
    assert said in file.read_text()
    assert load_config(file, {}).task.reward == "reward.py:reward"
    assert main(["plan", "--config", str(file), "--gpus", gpus]) == 0
    capsys.readouterr()


def test_a_language_model_beside_a_tower_is_counted_alone():
    """Contract: by text_config, with the whole's tie, and the same layers under another type."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    text = {
        **sizes,
        "num_attention_heads": 4,
        "vocab_size": 99,
        "model_type": "qwen3",
        "tie_word_embeddings": True,
    }
    whole = {
        "model_type": "qwen3_vl",
        "text_config": {**text, "model_type": "qwen3_vl_text"},
        "tie_word_embeddings": False,
        "vision_config": {"depth": 24},
    }
    alone = shapes_of({**text, "tie_word_embeddings": False}, "model")
    assert shapes_of(whole, "model") == alone


@pytest.mark.parametrize("kind", COUNTED)
def test_matrices_are_those_of_the_architecture_if_shapes_are_exact(kind: str):
    """Contract: names and shapes are transformers' own, of all but protected layers. Blind spot:
    families that cannot be built from their defaults are not exact.
    """
    settings = {"model_type": kind, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 99}
    shapes = shapes_of({**settings, "intermediate_size": 96, "num_hidden_layers": 2}, kind)
    if shapes.exact:
        sizes: dict[str, Any] = {"num_hidden_layers": 2}
        architecture = CONFIG_MAPPING[kind](**sizes)
        own = weight_shapes(empty_model(architecture)).items()
        counted = matrices(shapes_of(architecture.to_dict(), kind))
        assert dict(counted) == {name: size for name, size in own if not is_protected(name)}


MISFITS = [
    ({"scheme": "w4a16"}, False),
    ({"scheme": "fp8-block"}, False),
    ({"scheme": "w4a16-g64", "layers": "*.mlp.down_proj=w4a16"}, True),
    ({"scheme": "w4a16-g64", "layers": "last:2=w8a16"}, False),
    ({"scheme": "w8a8"}, True),
]
"""Fields of a configuration of SmolLM2-135M, of 576 hidden columns and 1536 of its MLP, and whether
they fit it.
"""


@pytest.mark.parametrize(("fields", "fits"), MISFITS)
def test_a_shape_that_does_not_fit_is_refused_as_the_plan_of_layers_does(
    fields: dict[str, str], fits: bool
):
    """Contract: before torch is imported, with the words of `plan_layers`."""
    config = load_config(None, {"model": REAL_MODEL, **fields})
    sizes = EMBEDDED[REAL_MODEL]
    names: dict[str, Any] = {"hidden_size": sizes.hidden, "intermediate_size": sizes.intermediate}
    names["num_hidden_layers"] = sizes.layers
    heads: dict[str, Any] = {
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
    }
    model = empty_model(CONFIG_MAPPING["llama"](**names, **heads))
    if fits:
        check_schemes(config)
        assert plan_layers(model, get_scheme(config.scheme), config.layers)
        return
    with pytest.raises(SchemeError) as early:
        check_schemes(config)
    with pytest.raises(SchemeError) as late:
        plan_layers(model, get_scheme(config.scheme), config.layers)
    assert str(early.value) == str(late.value)
