"""From an export to others: its model card, answers for eyes, the table of runs."""

import json
import re
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from safetensors.torch import save_file

from qarl.cli.main import main
from qarl.cli.serve import find_served, needed_fields
from qarl.configs.load import config_file, load_config
from qarl.configs.schemes import SCHEME_SPECS
from qarl.report.run_folder import RunFolder
from qarl.rollout.servers.vllm.start import server_command
from qarl.rollout.types import RequestDefaults
from qarl.run.export_note import add_to_note, export_note
from qarl.run.model_card import write_card
from qarl.run.served import Served
from tests.support.transformers_engine import use_transformers_engine

LICENSED = "---\nlicense: other\nlicense_name: made-up\ntags: [a]\n---\n# Base\n"


@pytest.fixture
def run(tmp_path: Path, random_policy, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """Return a finished run of three steps whose export comes from a base with a license in its
    card.
    """
    monkeypatch.chdir(tmp_path)
    base = Path(shutil.copytree(random_policy(True), tmp_path / "base"))
    (base / "README.md").write_text(LICENSED)
    config = load_config(
        config_file("tiny-qwen3"), {"output": "runs/one", "model": "base", "steps": "3"}
    )
    run = RunFolder.create(config)
    shutil.copytree(base, run.export)
    note = export_note(run.path, config, 3, run.export, base)
    (run.export / "qarl.json").write_text(json.dumps(note))
    add_to_note(
        run.export,
        digest="d1ce",
        heldout_accuracy=0.5,
        heldout_interval=[0.4, 0.6],
        heldout_problems=256,
    )
    write_card(run.export)
    lines = (
        {"step": step, "accuracy": 0.25} if step == 2 else {"step": step} for step in (1, 2, 3)
    )
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    start = {"audit": [], "canary": None, "accuracy": 0.125, "heldout_reward": None, "figures": []}
    run.start.write_text(json.dumps(start))
    return run


def test_a_model_card_says_what_the_note_does(run: RunFolder, tmp_path: Path):
    text = (run.export / "README.md").read_text()
    front = re.match(r"---\n(.*?)---\n", text, re.DOTALL)
    assert front is not None
    tree = yaml.safe_load(front[1])
    assert (tree["license"], tree["license_name"]) == ("other", "made-up")
    assert "base_model" not in tree, "a folder's name is not an id"
    assert tree["tags"] == [
        "qarl",
        "reinforcement-learning",
        "compressed-tensors",
        "w4a16",
    ]
    for part in (
        "# one\n",
        "`base`, trained",
        "step 3",
        "50.0% [40.0, 60.0] of 256 problems",
        "`d1ce`",
        "qarl 0.1.0",
    ):
        assert part in text, part
    assert str(tmp_path) not in text + (run.export / "qarl.json").read_text()
    add_to_note(run.export, base="Qwen/Qwen3-8B-Base", ptq="gptq", licence={})
    write_card(run.export)
    text = (run.export / "README.md").read_text()
    assert "base_model: Qwen/Qwen3-8B-Base\nbase_model_relation: quantized\nlibrary_name" in text
    assert "by gptq after reinforcement" in text


def test_a_model_card_says_how_the_policy_was_asked(run: RunFolder):
    defaults = RequestDefaults(
        system="Be brief.\n``` | ```",
        template={"enable_thinking": False},
        stop=("it's | over",),
        sampling={"temperature": 0.0},
    )
    served = {"questions": 8, "equal": 7, "difference": "top_k is 0 and 2"}
    task = {"name": "hf:owner/questions"}
    add_to_note(run.export, requests=defaults.record(), served=served, task=task)
    write_card(run.export)
    text = (run.export / "README.md").read_text()
    assert "\n\n    Be brief.\n    ``` | ```\n\n" in text
    assert '| template arguments | `{"enable_thinking": false}` |' in text
    assert "| evaluation | greedy |" in text
    assert "| served as evaluated | 7 of 8 questions |" in text
    # the shell gives curl what a client has to send
    (command,) = re.findall(r"^curl .*$", text, re.MULTILINE)
    body = json.loads(shlex.split(command)[-1])
    assert (body["temperature"], body["stop"]) == (0, ["it's | over"])
    front = yaml.safe_load(text.split("---\n")[1])
    assert front["datasets"] == ["owner/questions"]
    (result,) = front["model-index"][0]["results"]
    (metric,) = result["metrics"]
    assert metric["value"] == 0.5
    assert metric["args"] == {"problems": 256, "interval_95": [0.4, 0.6]}


@pytest.mark.parametrize("scheme", SCHEME_SPECS)
@pytest.mark.parametrize("in_a_layer", [False, True], ids=["all layers", "a layer"])
def test_a_model_card_says_what_vllm_alone_lacks_on_cpus(
    scheme: str, in_a_layer: bool, run: RunFolder
):
    """Contract: int4 weights alone need AVX-512, and in bfloat16 AMX rounds their activations;
    w4a8 and quantized experts need QaRL; nothing else is said.
    """
    layers = [f"layers.0.*={scheme}"] if in_a_layer else []
    int4 = scheme.startswith("w4a16")
    for dtype in ("bfloat16", "float16"):
        whole = "bf16" if in_a_layer else scheme
        add_to_note(run.export, scheme=whole, layers=layers, dtype=dtype)
        write_card(run.export)
        text = (run.export / "README.md").read_text()
        rounds = int4 and dtype == "bfloat16"
        assert ("With AMX it rounds activations" in text) == rounds
        assert ("every request fails" in text) == int4
        assert ("CPUs with AMX `vllm serve` without QaRL ends by" in text) == (scheme == "w4a8")
        assert ("On CPUs" in text) == (int4 or scheme == "w4a8")
    experts = {"model.layers.0.mlp.experts.0.up_proj.weight_scale": torch.ones(1)}
    save_file(experts, run.export / "model.safetensors")
    write_card(run.export)
    text = (run.export / "README.md").read_text()
    assert "int8 and int4 experts alone" in text
    assert "every request fails" not in text


def test_the_real_models_card_names_base_and_licence(run: RunFolder):
    """The embedded model's folder in the cache has no card of its own."""
    config = load_config(config_file("smollm2-135m"), {})
    note = export_note(run.path, config, 3, run.export, run.export)
    assert note["base"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert note["licence"] == {"license": "apache-2.0"}


def test_serving_a_greedily_measured_export_is_greedy_by_default(run: RunFolder):
    defaults = RequestDefaults(sampling={"temperature": 0.0}, stop=("x",))
    add_to_note(run.export, requests=defaults.record())
    served = find_served(run.path)
    command = server_command(served, "127.0.0.1", 8000, [])
    option = command[command.index("--override-generation-config") + 1]
    assert json.loads(option) == {"temperature": 0.0}
    assert needed_fields(served) == (
        'requests have to give what answers were measured with: {"stop": ["x"]}'
    )
    add_to_note(run.export, requests=RequestDefaults(sampling={"temperature": 0.6}).record())
    served = find_served(run.path)
    assert "--override-generation-config" not in server_command(served, "127.0.0.1", 8000, [])
    assert needed_fields(served) is None


def test_answers_for_eyes(run: RunFolder, random_policy, monkeypatch: pytest.MonkeyPatch, capsys):
    use_transformers_engine(monkeypatch)
    defaults = ["sample", str(run.path), "1 + 1 =", "--max-new-tokens", "3"]
    assert main([*defaults, "--beside", str(random_policy(True))]) == 0
    first, answer, second, same = capsys.readouterr().out.splitlines()
    assert first == f"— {run.path} (3 tokens, length)"
    assert second == f"— {random_policy(True)} (3 tokens, length)"
    assert answer == same, "the same weights, and the same seed"
    for option, value in (("--temperature", "-1"), ("--samples", "0")):
        assert main(["sample", str(run.path), "x", option, value]) == 2
        assert f"eval.{option[2:]} {value} must be" in capsys.readouterr().err


def test_export_prints_its_step_digest_and_proof(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Blind spot: the exports are stand-ins; tests/runs makes real ones."""
    (run.checkpoints / "step-000003").mkdir(parents=True)
    (run.checkpoints / "step-000003" / "manifest.json").touch()
    written = SimpleNamespace(tensors=9, bytes=3 * 2**19, hexdigest=lambda: "0123456789abcdef" * 4)
    served = Served(questions=8, equal=7, difference="top_k is 0 and 2")
    exported = SimpleNamespace(
        step=3, moved=0.0125, calibration=[[1, 2], [3]], written=written, served=served
    )
    proof = (
        "9 tensors, 1.5 MiB, digest 0123456789abcdef…; loaded in a fresh engine, mean |Δ log p|"
        " against"
    )
    monkeypatch.setattr("qarl.preflight.support.require_schemes", lambda _: None)
    monkeypatch.setattr("qarl.run.export.export_run", lambda *_: exported)
    assert main(["export", str(run.path), "-o", "out"]) == 0
    line, compared = capsys.readouterr().out.splitlines()
    assert line == f"wrote step 3 to out: {proof} the learner 1.25e-02 nats"
    assert compared.endswith(
        "7 of 8 questions; first difference, evaluated and served: top_k is 0 and 2"
    )
    monkeypatch.setattr("qarl.ptq.export.export_ptq", lambda *_: exported)
    assert main(["export", str(run.path), "-o", "out", "--ptq", "gptq", "--scheme", "w8a8"]) == 0
    quantized = "quantized step 3 by gptq to w8a8 on 2 sequences (3 tokens); wrote out:"
    assert capsys.readouterr().out.splitlines() == [
        f"{quantized} {proof} the unquantized policy 1.25e-02 nats",
        compared,
    ]


def test_runs_are_a_table(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    own = {"steps": "9", "scheme": "w8a8"}
    two, bad, odd = (
        RunFolder.create(load_config(None, {"output": f"runs/{n}", **own}))
        for n in ("two", "bad", "odd")
    )
    odd.metrics.write_text("null\n")
    (bad.path / "config.yaml").write_text("stpes: 5\n")
    two.metrics.write_text('{"step": 4, "reward": 1}\n{"step": 5, "rew')
    (two.checkpoints / "step-000004").mkdir(parents=True)
    (two.checkpoints / "step-000004" / "manifest.json").touch()

    def table() -> dict[str, list[str]]:
        assert main(["runs"]) == 0
        rows = [re.split(r"  +", line.strip()) for line in capsys.readouterr().out.splitlines()]
        assert rows[0] == ["run", "state", "step", "scheme", "held-out", "age"]
        return {row[0]: row[1:] for row in rows[1:]}

    shown = table()
    assert shown["one"][:4] == ["exported", "3/3", "w4a16", "12.5% → 50.0%"]
    assert shown["two"][:3] == ["stopped", "4/9", "w8a8"]
    assert shown["bad"][0].startswith("unreadable: unknown key 'stpes'")
    assert "unreadable" in shown["odd"][0]
    with two.locked():
        assert table()["two"][0] == "running"
