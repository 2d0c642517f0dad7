"""Wrong input of a person: one message, exit status 2, nothing left behind. In process and
without an engine; `scripts/bad_inputs.py` generates hundreds of the kind.
"""

import dataclasses
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from qarl.cli.main import main
from qarl.configs.errors import ConfigError, ModelError
from qarl.configs.load import config_file, load_config
from qarl.configs.schema.run import RunConfig
from qarl.configs.schema.task import TaskConfig
from qarl.preflight.support import require_servers_of_ranks
from qarl.report.run_folder import RunFolder, resumed_config
from qarl.run.evaluation_plan import plan_evaluation
from qarl.run.export_note import export_note
from qarl.tasks.paths import absolute, relative
from tests.support.kernels import no_cuda

FILES_OF_CASES = {
    "q.jsonl": ('{"question": "1 + 1 =", "answer": "2", "split": "train"}\n'),
    "list.json": '[{"question": "1 + 1 =", "answer": "2"}]',
    "raises.py": "def reward(problem, text):\n    return {}['score']\n",
    "exits.py": ("import sys\n\n\ndef reward(problem, text):\n    sys.exit(3)\n"),
    "model.gguf": "GGUF",
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty working folder with a few files of questions, rewards and configurations."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("QARL_SERVER_KEY", raising=False)
    for name, text in FILES_OF_CASES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "latin.yaml").write_bytes(b"# \xe9\n")
    (tmp_path / "taken").mkdir()
    (tmp_path / "all" / "begun" / "config.yaml").mkdir(parents=True)
    return tmp_path


def refused(arguments: str, capsys: pytest.CaptureFixture[str], place: Path) -> str:
    """Return the message of a refused command, and check the rest of the contract: exit status 2,
    at most four lines, no file changed.
    """
    before = {
        path: path.stat().st_mtime_ns
        for path in place.rglob("*")
        if "__pycache__" not in path.parts
    }
    assert main(shlex.split(arguments)) == 2
    message = capsys.readouterr().err
    assert (
        message.count("\n") <= 4
        and "Traceback" not in message
        and "validation error" not in message
    ), message
    after = {
        path: path.stat().st_mtime_ns
        for path in place.rglob("*")
        if "__pycache__" not in path.parts
    }
    assert before == after
    return message


REFUSED_COMMANDS = [
    (
        "train --dry-run --task chain_sum --task.options.min_digits 1.5",
        "'min_digits' of task 'chain_sum' is 1.5; it must be a whole number",
    ),
    (
        "train --dry-run --task chain_sum --task.options.allow_negation maybe",
        "must be true or false",
    ),
    ("train --dry-run --task chain_sum --task.options.max_digits 5000", "fails with the options"),
    ("train --dry-run --task q.jsonl --reward math=0.0", "must be a finite number that is not 0"),
    (
        "compare baselines --seeds 0,0",
        "'0,0' must be different whole numbers from 0 up with commas between",
    ),
    ("compare baselines --seeds 0,1 --variants nope", "nope"),
    (
        "serve-rollouts -- --host 0.0.0.0",
        "--host behind -- would bypass the key; give --host, --port and --key-file",
    ),
    ("serve-rollouts -- --hos=0.0.0.0", "--hos=0.0.0.0 behind -- would bypass the key"),
    ("serve-rollouts -- --api_key=k", "--api_key=k behind -- would bypass the key"),
    ("serve-rollouts -- --tensor_parallel=2", "would be unknown to the runs' learner"),
    (
        "serve-rollouts --rollout.tensor_parallel_size 2 -- --enable-expert-par",
        "--enable-expert-par behind -- would give each rank whole experts",
    ),
    ("serve-rollouts -- -tp 2", "-tp behind -- would be unknown to the runs' learner"),
    (
        "train --rollout.tensor_parallel_size 2 --learner.operators transformers",
        "needs the engine's model as the learner's",
    ),
    ("trian", "'trian' must be one of train, sft, check, init, export"),
    ("mismatched", "did you mean 'mismatch'?"),
    ("train --lr .inf", "(--lr) inf must be a finite number"),
    ("train --aligned", "option --aligned needs a value"),
    ("train --stepz", "unknown option --stepz; did you mean '--steps'?"),
    ("mismatch --stepz 3", "unknown option --stepz; did you mean '--steps'?"),
    ("compare schemes --dry-rn", "unknown option --dry-rn; did you mean '--dry-run'?"),
    ("serve x --port eighty", "--port 'eighty' must be a whole number"),
    ("serve nope", "there is no folder 'nope'"),
    ("train --learner.zero_stage 3", "several processes share masters, gradients and moments"),
    ("serve taken", "has no config.json"),
    ("serve x --max-model-len 5 -- --api-key k", "unknown option --max-model-len"),
    ("serve x --prot 80", "unknown option --prot; did you mean '--port'?"),
    ("report x --opne=now", "unknown option --opne"),
    (
        "check tiny-qwen3 --config b.yaml",
        "--config b.yaml is a second one, beside 'tiny-qwen3'; give one of them",
    ),
    ("train --task.time_limit 3e6", "must be less than or equal to 1000000"),
    ("train run.yaml", "options read --name VALUE; a configuration is --config run.yaml"),
    ("check --config nope.yaml", "no configuration file 'nope.yaml'"),
    ("plan --gpus 80GB", "known are A100"),
    ("plan --gpus 0xH100", "known are A100"),
    ("plan --gpus 8xP100", "known are A100"),
    ("plan --gpus '8 H100'", "known are A100"),
    ("plan --gpus 1xH100 --processes 2", "1 × H100 has 1; one process takes one GPU"),
    ("plan --processes 0", "--processes '0' must be a whole number from 1 up"),
    ("train --config a --config b", "option --config is given twice"),
    (
        "train --lr 1e-3 --learner.optimizer.lr 1e-4",
        "--learner.optimizer.lr 1e-4 is also given by its short flag",
    ),
    ("train --learner.optimizer.lr=1e-4 --lr 1e-3", "with '1e-3'; give it once, by either"),
    ("train --eval.every 1 --eval.every=2", "option --eval.every is given twice, with '1' and '2'"),
    ("train seed=1", "unexpected argument 'seed=1'; options read --name VALUE"),
    ("train --learner.optimizer.betas [2,3]", "betas 3 must be less than 1"),
    ("train --eval.top_p 0.9", "eval.top_p 0.9 with eval.temperature 0 has no effect"),
    (
        "train --learning_rate 1e-5",
        "unknown option --learning_rate; did you mean --lr (learner.optimizer.lr)?",
    ),
    ("train --temperature 0.7", "did you mean --rollout.temperature?"),
    ("train --model './a.b c'", "model folder './a.b c' does not exist"),
    ("train --top_p 0.9", "top_p: a policy is trained on completions of its whole distribution"),
    ("train --max_new_tokens 5", "did you mean '--max-new-tokens'?"),
    ("train --layers [=w8a8", "option --layers '[=w8a8' cannot be read"),
    (
        "train --learner 5",
        "option --learner is a section; give one of its fields, such as --learner.aligned",
    ),
    ("train --processes 0", "--processes '0' must be a whole number from 1 up"),
    ("train --dry-run --processes -3", "--processes '-3' must be a whole number from 1 up"),
    (
        "train --learner.optimizer.name adamw --learner.optimizer.momentum 0.9",
        "momentum 0.9 is Muon's, and adamw has betas",
    ),
    (
        ("train --steps 10 --learner.optimizer.warmup_steps 8 --learner.optimizer.decay_steps 5"),
        "warmup_steps 8 and decay_steps 5 are more than steps 10",
    ),
    ("check --objective own --learner.objective.function nope.py:f", "nope.py"),
    ("check --reward exact,exact", "names a reward twice; add its weights up"),
    ("train --processes 3 --dry-run", "rollout.prompts 128 is not a multiple of 3 processes"),
    ("init mine --gpus 1x24GB", "--gpus 1x24GB goes with --model"),
    ("init mine --model nowhere/", "model folder 'nowhere/' does not exist"),
    ("serve-rollouts --replicas 0", "--replicas '0' must be a whole number from 1 up"),
    (
        "serve-rollouts --replicas 1 --devices 1 --scheme w8a16",
        "'w8a16' cannot run in the engine on this machine",
    ),
    ("serve-rollouts --host 0.0.0.0", "--key-file, or QARL_SERVER_KEY"),
    ("report nope", "there is no folder 'nope'"),
    ("report taken", "'taken' is not a run folder (it has no config.yaml)"),
    ("train --config paper/qwen3-8b", "did you mean 'paper/qwen3-8b-base'?"),
    ("train --config taken", "configuration 'taken' is a folder"),
    ("train --config latin.yaml", "is not UTF-8 text"),
    ("train --scheme W4A16", "did you mean 'w4a16'?"),
    ("train --output taken", "run folder 'taken' exists; give another --output"),
    ("train --model tiny-qwen", "did you mean 'tiny-qwen3'?"),
    # little memory is asked for, which is checked before the name
    (
        "train --model Qwen3-0.6B --max-new-tokens 64 --learner.micro_batch_tokens 2112"
        " --learner.lora.name lora",
        "as in Qwen/Qwen3-0.6B",
    ),
    ("train --model model.gguf", "'model.gguf' is a GGUF file; give the original checkpoint"),
    ("check --model ./model.gguf", "'./model.gguf' is a GGUF file"),
    ("mismatch --model model.gguf", "'model.gguf' is a GGUF file"),
    ("schemes --model model.gguf", "'model.gguf' is a GGUF file"),
    ("train --model q.jsonl", "'q.jsonl' is a file; give the folder"),
    ("train --model taken", "'taken' has no config.json"),
    ("train --task [red]nope.jsonl", "task file [red]nope.jsonl does not exist"),
    ("train --task list.json", "jq -c '.[]' list.json > list.jsonl"),
    ("train --task chain_sums", "or hf:DATASET; did you mean chain_sum"),
    ("train --task chain_sum --task.options.terms 2", "unknown option 'terms' of task 'chain_sum'"),
    (
        "train --task chain_sum --task.options.min_terms two",
        "'min_terms' of task 'chain_sum' is 'two'",
    ),
    (
        "train --task q.jsonl --task.prompt text",
        "q.jsonl:1: no column 'text'; there are: question, answer, split",
    ),
    ("train --task.data q.jsonl", "task.data 'q.jsonl' is where task math has its problems"),
    ("eval taken --steps 5", "unknown option --steps of qarl eval"),
    (
        "train --reward nope:f",
        "there is no module 'nope', neither in the working folder nor installed",
    ),
    ("train --reward raises:reward", "raised KeyError: 'score'"),
    ("train --reward exits.py:reward", "raised sys.exit(3)"),
    ("check nope.yaml", "no configuration file 'nope.yaml'"),
    ("init taken", "folder 'taken' exists; give another DIR"),
    ("export nope -o out", "there is no folder 'nope'"),
    ("export taken -o taken", "folder 'taken' exists; give another --output"),
    ("export taken -o q.jsonl/out", "cannot make folder 'q.jsonl/out': Not a directory"),
    ("eval taken --problems 0", "--problems 0 must be at least 1"),
    (
        "eval taken --samples 4 --temperature 0",
        "eval.samples 4 with eval.temperature 0: greedy answers are all",
    ),
    (
        "eval taken --top-k 5 --eval.top_k 5",
        "--eval.top_k 5 is also given by its short flag, with '5'",
    ),
    ("eval taken --eval.every 5", "unknown option --eval.every of qarl eval"),
    ("eval taken --suite maths", "--suite 'maths' must be one of math; did you mean 'math'?"),
    ("eval taken --suite math --task gcd", "--task.name gcd does not go with --suite math"),
    ("eval taken --suite math --data nope", "--data nope: there is no such folder"),
    ("eval taken --data taken", "--data taken goes with --suite"),
    (
        "eval taken --suite math",
        "--suite math of 'taken', which does not say how long its answers are",
    ),
    ("eval taken --against q.jsonl --max-new-tokens 8", "'taken' has no config.json"),
    ("eval taken --max-new-tokens 0", "--max-new-tokens 0 must be from 1 to 16777216"),
    (
        "eval taken --max-new-tokens 99999999",
        "--max-new-tokens 99999999 must be from 1 to 16777216",
    ),
    ("eval taken --eval.problems 00", "--problems 0 must be at least 1"),
    ("eval taken --json no/such/x.json", "--json no/such/x.json: 'no/such' cannot be written to"),
    ("eval taken --task.options 5", "task.options 5 must be a valid mapping"),
    ("eval ''", "TARGET is empty"),
    ("eval ./nope", "there is no folder './nope' here"),
    ("eval runs/nope", "there is no folder 'runs/nope' here; give a run's"),
    ("eval taken", "'taken' has no config.json"),
    ("eval all", "'all' has no config.json; give one of the runs in it, such as 'all/begun'"),
    ("schemes --json taken", "--json taken: is a folder"),
    ("check --rollout.prompts few", "rollout.prompts (--prompts) 'few' must be a valid integer"),
    ("mismatch --bitwise few", "bitwise 'few' must be"),
    ("check --machine tiny-qwen3", "tiny-qwen3 with --machine, which looks at the machine alone"),
    ("check --machine --scheme w8a8", "--scheme with --machine"),
    ("tasks countdwon", "did you mean countdown"),
    ("runs nope", "there is no run in 'nope'"),
    ("train --resume nope", "there is no folder 'nope'"),
    ("train --from-rollouts nope", "there is no folder 'nope'"),
    ("train --resume taken", "'taken' is not a run folder"),
]


@pytest.mark.parametrize(("arguments", "said"), REFUSED_COMMANDS)
def test_a_wrong_command_prints_one_message_and_changes_no_file(
    place: Path, capsys, arguments: str, said: str
):
    assert said in refused(arguments, capsys, place)


REFUSED_WITHOUT_TORCH = [
    "mismatch --config tiny-qwen3 --prompts 1 --prompts 2",
    "mismatch --config tiny-qwen3 --promts 1",
    "mismatch --config tiny-qwen3 --samples two",
    "mismatch --config tiny-qwen3 --scheme w9",
    "mismatch --model model.gguf",
    "train --model model.gguf",
    "train --model smollm2-135m --scheme w4a16",
    "check --model smollm2-135m --scheme w4a16",
    "mismatch --model smollm2-135m --scheme w4a16",
    "plan --model smollm2-135m --scheme w4a16",
    "compare --vary scheme=w4a16-g64,w4a16 --model smollm2-135m",
    "schemes --model nowhere/",
    "schemes --model taken",
    "eval nope",
    "eval taken",
    "sample nope hello",
    "export nope -o out",
    "serve nope",
]


def test_wrong_commands_are_refused_before_torch_is_imported(place: Path):
    """Run all commands in one process, which would keep whatever any of them imported. Blind spot:
    duration, which was measured as 0.8 s a command on a quiet machine.
    """
    lines = REFUSED_WITHOUT_TORCH
    code = (
        "import sys; from qarl.cli.main import main\nfor line in sys.argv[1:]:\n    status ="
        " main(line.split()); heavy = {'torch', 'vllm', 'transformers'} & sys.modules.keys()\n   "
        " assert (status, heavy) == (2, set()), (line, status, heavy)"
    )
    # not the checkout that is installed
    here = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    result = subprocess.run(
        [sys.executable, "-c", code, *lines], capture_output=True, text=True, env=here
    )
    assert result.returncode == 0, result.stderr


def change_json(file: Path, **fields: object) -> None:
    tree = json.loads(file.read_text())
    file.write_text(json.dumps({**tree, **fields}))


REFUSED_MODELS = [
    ("config.json", "[1]", "holds a list, not an object of settings"),
    ("config.json", "{", "is not JSON"),
    ("tokenizer.json", "{", "tokenizer.json' is not JSON"),
    ("model.safetensors", "", "is not a safetensors file, or cut short: "),
    ("model.safetensors", "garbage", "is not a safetensors file, or cut short"),
    ("model.safetensors", "\x02\x00\x00\x00\x00\x00\x00\x00[]", "is not a safetensors file"),
    ("model.safetensors", 1000000, "is not a safetensors file, or cut short: Error"),
    ("config.json", {"quantization_config": {"quant_method": "gptq"}}, "already quantized"),
    ("config.json", {"max_position_embeddings": 64}, "'model' has 64 positions"),
    (
        "model.safetensors.index.json",
        '{"weight_map": {"a": "b"}}',
        "lacks 1 of its 1 weight files, the first being 'b'",
    ),
    ("config.json", "[]", "holds a list, not an object of settings"),
    ("config.json", {"hidden_size": 256}, "in its files and"),
    ("config.json", {"model_type": "t5"}, "'t5', no causal language model"),
    (
        "config.json",
        {"model_type": "muse_glimmer"},
        "'muse_glimmer', which takes pictures beside text",
    ),
    ("config.json", {"model_type": "nope"}, "cannot be built from its config.json"),
    ("tokenizer.json", {"model": {}}, "the tokenizer of 'model' cannot be loaded"),
]


@pytest.mark.parametrize(("name", "content", "said"), REFUSED_MODELS)
def test_models_are_refused(
    place: Path, random_policy, capsys, monkeypatch, name: str, content: Any, said: str
):
    """Contract: a faulty model is refused before a run folder is made; kernels are not asked.
    content: the file's new text, its changed fields, or the length it is cut to.
    """
    monkeypatch.setattr("qarl.preflight.support.require_support", lambda *_, **__: None)
    file = Path(shutil.copytree(random_policy(True), place / "model")) / name
    if isinstance(content, dict):
        change_json(file, **content)
    elif isinstance(content, int):
        os.truncate(file, content)
    else:
        file.write_bytes(content.encode("latin-1"))
    command = "train --config tiny-qwen3 --model model --scheme bf16 --rollout.max_new_tokens 8"
    assert said in refused(command, capsys, place)


def test_the_registrys_package_of_the_same_name_is_refused(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """Blind spot: where that package was installed last, its command runs and not this one."""
    metadata = place / "packages/qarl-0.1.1.dist-info/METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: qarl\nVersion: 0.1.1\n")
    monkeypatch.syspath_prepend(str(place / "packages"))
    assert main(["check", "--model", "tiny-qwen3"]) == 2
    assert "the distribution 'qarl' 0.1.1 is installed beside" in capsys.readouterr().err


def test_version_and_help_exit_with_status_zero(capsys: pytest.CaptureFixture[str]):
    for arguments in (["--version"], ["-V"], ["version"]):
        assert main(arguments) == 0
        assert capsys.readouterr().out.startswith("qarl ")
    assert main(["help"]) == 0


def test_an_export_is_measured_as_its_run_is(tmp_path: Path, random_policy):
    """Contract: task, its options, limits and dtype of the run are read back from qarl.json; naming
    another task forgets the options, and a run's dtype is not overridden in silence.
    """
    config = load_config(
        config_file("tiny-qwen3"), {"output": str(tmp_path / "run"), "dtype": "float16"}
    )
    run = RunFolder.create(config)
    shutil.copytree(random_policy(True), run.export)
    (run.export / "qarl.json").write_text(json.dumps(export_note(run.path, config, 3, run.export)))
    asked: dict[str, Any] = {"overrides": {}, "max_new_tokens": None, "dtype": None}
    of_run, of_export = (plan_evaluation(str(path), **asked) for path in (run.path, run.export))
    assert dataclasses.replace(of_run, target=of_export.target) == of_export
    assert of_export.task == config.task
    assert of_export.rollout.max_num_seqs == 512
    assert of_export.dtype == "float16"
    assert of_export.rollout.max_new_tokens == 8
    assert of_export.evaluation == config.eval.model_copy(update={"every": 50})
    changed = {
        "task.name": "gcd",
        "eval.samples": "4",
        "eval.temperature": "0.6",
        "eval.top_p": "0.95",
    }
    other = plan_evaluation(str(run.export), **{**asked, "overrides": changed, "max_new_tokens": 9})
    assert (other.task, other.rollout.max_new_tokens) == (TaskConfig(name="gcd"), 9)
    assert other.evaluation.samples == 4
    assert other.evaluation.top_p == 0.95
    assert other.evaluation.problems == config.eval.problems
    with pytest.raises(ConfigError, match=r"--dtype bfloat16: run .* computes in float16; omit it"):
        plan_evaluation(str(run.path), **{**asked, "dtype": "bfloat16"})
    with pytest.raises(
        ModelError,
        match=r"rollout.max_new_tokens \(--max-new-tokens\) = 4160, .* has 512 positions",
    ):
        plan_evaluation(str(run.path), **{**asked, "max_new_tokens": 4096})
    (run.export / "qarl.json").unlink()
    assert plan_evaluation(str(run.export), {}).dtype == "bfloat16", "of a checkpoint in float32"
    for own, dtype in (
        ({"dtype": "float16"}, "float16"),
        ({"quantization_config": {}}, "float32"),
    ):
        change_json(run.export / "config.json", **{"dtype": "float32", **own})
        assert plan_evaluation(str(run.export), {}).dtype == dtype
    (run.export / "qarl.json").write_text("{}")
    with pytest.raises(ConfigError, match="lacks 'run'; export the run again"):
        plan_evaluation(str(run.export), **asked)


RUN_OF_FILES = {
    "output": "run",
    "model": "model",
    "task.name": "q.jsonl",
    "learner.objective.name": "own",
    "task.reward": "raises.py:reward=1, math",
    "task.correct": "tests.support.rewards:reward",
    "learner.objective.function": "own.py:objective",
    "rollout.max_new_tokens": "8",
}


def test_a_run_is_resumed_and_evaluated_in_any_folder(
    place: Path, random_policy, monkeypatch: pytest.MonkeyPatch
):
    """Contract: a run's configuration has absolute paths, of model, questions and functions, and
    its export's note names them from its own folder; ids, modules and built-in names stay. A folder
    that moves takes its files along.
    """
    shutil.copytree(random_policy(True), place / "model")
    (place / "data").mkdir()
    config = load_config(config_file("tiny-qwen3"), RUN_OF_FILES)
    run = RunFolder.create(config)
    shutil.copytree(place / "model", run.export)
    (run.export / "qarl.json").write_text(json.dumps(export_note(run.path, config, 3, run.export)))
    assert str(place) not in (run.export / "qarl.json").read_text(), (
        "what is published names no folder of the machine"
    )
    monkeypatch.chdir(place / "data")
    found = RunFolder.open(place / "run").config()
    assert found.model == str(place / "model")
    assert found.task.name == str(place / "q.jsonl")
    assert found.task.reward == f"{place / 'raises.py'}:reward=1, math"
    assert found.task.correct == "tests.support.rewards:reward"
    assert getattr(found.learner.objective, "function", None) == f"{place / 'own.py'}:objective"
    asked = {"task.reward": "../raises.py:reward=1, math"}
    assert resumed_config(found, load_config(place / "run" / "config.yaml", asked)) == found
    for target in (place / "run", place / "run" / "export"):
        assert plan_evaluation(str(target), {}).task == found.task
    (place / "moved").mkdir()
    for name in ("run", "q.jsonl", "raises.py"):
        (place / name).rename(place / "moved" / name)
    moved = plan_evaluation(str(place / "moved" / "run" / "export"), {}).task
    assert moved.name == str(place / "moved" / "q.jsonl")
    hub = absolute(TaskConfig(name="hf:model", data="hf:owner/name", rollout="talk.py:talk"), place)
    assert hub.name == f"hf:{place / 'model'}"
    assert hub.data == "hf:owner/name"
    assert hub.rollout == f"{place / 'talk.py'}:talk"
    assert (
        absolute(TaskConfig(environment="tools.py:Shop"), place).environment
        == f"{place / 'tools.py'}:Shop"
    )
    assert relative(hub, place).name == "hf:model"


def test_generated_bad_inputs_keep_the_contract():
    """Run a few inputs of every kind that `scripts/bad_inputs.py` makes; the script itself tries
    hundreds.
    """
    script = Path(__file__).parents[2] / "scripts" / "bad_inputs.py"
    done = subprocess.run(
        [sys.executable, str(script), "--count", "39"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@no_cuda
def test_ranks_without_servers_or_cores_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(4))

    def config(ranks: int, servers: str | None) -> RunConfig:
        served = {} if servers is None else {"rollout.servers": servers}
        return load_config(None, {"rollout.tensor_parallel_size": str(ranks), **served})

    require_servers_of_ranks(config(1, None))
    require_servers_of_ranks(config(2, "2"))
    require_servers_of_ranks(config(64, "http://a:1"))
    with pytest.raises(ConfigError, match=r"2 without rollout\.servers: .* has one rank"):
        require_servers_of_ranks(config(2, None))
    with pytest.raises(ConfigError, match="for 3 servers on 4 cores"):
        require_servers_of_ranks(config(2, "3"))
    with pytest.raises(ConfigError, match="for 2, 3, 4, 8 of them"):
        require_servers_of_ranks(config(5, "1"))
