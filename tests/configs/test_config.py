"""Configuration: every shipped file parses, every mistake is quoted back with its remedy."""

import functools
from pathlib import Path
from typing import get_args

import pytest
import yaml

from qarl.configs.errors import ConfigError, disk_error
from qarl.configs.files import written_aside
from qarl.configs.flags import FLAGS, OPTIONS_WITHOUT_FIELD, OTHER_TRAINERS_OPTIONS
from qarl.configs.functions import FunctionKind, load_function
from qarl.configs.load import (
    config_file,
    default_config,
    field_paths,
    load_config,
    shipped_names,
)
from qarl.configs.schema.objectives import AnyObjective
from qarl.configs.schema.run import TaskConfig
from qarl.report.run_folder import FIXED_FIELDS, resumed_config
from qarl.rollout.types import Sampling
from tests.support.cases import pattern


def test_naming_another_task_forgets_the_files_options(tmp_path: Path):
    """Contract: digits and reward of the embedded default belong to its own task. A task file of
    one's own starts without options.
    """
    file = config_file("tiny-qwen3")
    assert load_config(file, {"task.name": "q.jsonl"}).task == TaskConfig(name="q.jsonl")
    kept = load_config(file, {"task.name": "chain_sum", "task.options.max_terms": "3"}).task
    assert kept.options == {
        "min_terms": 2,
        "max_terms": 3,
        "min_digits": 2,
        "max_digits": 2,
    }
    assert kept.reward == "qarl.tasks:exact_reward"


@pytest.mark.parametrize("name", shipped_names())
def test_every_shipped_file_sets_what_it_says(name: str):
    """Contract: a file's top-level fields that are single values are the configuration's."""
    config = load_config(config_file(name), {})
    written = yaml.safe_load(Path(config_file(name)).read_text())
    scalars = {key: value for key, value in written.items() if not isinstance(value, (dict, list))}
    assert scalars
    assert {key: getattr(config, key) for key in scalars} == scalars


TABLE_2 = {
    "data.train_batch_size": [512, "rollout.prompts"],
    "data.max_prompt_length": [2048, "rollout.max_prompt_tokens"],
    "data.max_response_length": [16384, "rollout.max_new_tokens"],
    "rollout.n": [8, "rollout.samples"],
    "val_kwargs.temperature": [0.6, "eval.temperature"],
    "actor.ppo_max_token_len_per_gpu": [22528, "learner.micro_batch_tokens"],
    "optim.opt_type": ["muon", "learner.optimizer.name"],
    "optim.lr": [1e-06, "learner.optimizer.lr"],
    "optim.weight_decay": [0.01, "learner.optimizer.weight_decay"],
    "actor.use_kl_loss": ["none", "learner.kl.name"],
    "actor.seq_clip_ratio_high": [0.0004, "learner.objective.epsilon_high"],
    "actor.neg_seq_clip_ratio_high": [0.0007, "learner.objective.delta_high"],
    "actor.neg_seq_clip_ratio_low": [0.0003, "learner.objective.delta_low"],
    "actor.seq_tis_imp_ratio_cap": [2, "learner.correction.cap"],
}
"""The paper's parameter → its value there, and the field that holds it here."""
PAPER = {
    "Qwen/Qwen2.5-Math-1.5B": {"rollout.max_new_tokens": 2048},
    "Qwen/Qwen2.5-Math-7B": {"rollout.max_new_tokens": 2048},
    "Qwen/Qwen3-8B-Base": {},
    "Qwen/Qwen3-30B-A3B-Base": {},
}
"""The paper's models → where their files deviate from the table, with reasons in the files."""


@pytest.mark.parametrize("model", PAPER)
def test_paper_files_hold_table_2(model: str):
    """Also what the table says of 64 prompts an update, the objective of its bounds, and QaRL's own
    sampling. Blind spot: seq_clip_ratio_low has no field, nnodes and n_gpu_per_node are the
    command's.
    """
    file = default_config(model)
    config = load_config(file, {})
    for value, path in TABLE_2.values():
        found = functools.reduce(getattr, path.split("."), config)
        assert found == PAPER[model].get(path, value), path
    assert config.model == model
    assert config.task.name == "math"
    assert config.scheme == "w4a16"
    assert config.rollout.prompts // config.learner.mini_batches == 64
    assert config.learner.objective.name == "tbpo"
    assert config.learner.correction.name == "geometric"
    assert Sampling(samples=8, max_new_tokens=1).temperature == 1.0
    assert "--processes 8" in file.read_text()
    assert "seq_clip_ratio_low" in file.read_text()


WRONG_VALUES = [
    pytest.param({"seed": "true"}, "seed true must be a number", id="seed-true-must-be"),
    pytest.param(
        {"learner.optimizer.lr": "yes"},
        "learner.optimizer: lr true must be a number",
        id="learner.optimizer-lr-true-must",
    ),
    pytest.param(
        {"learner.alinged": "false"},
        "--learner.alinged; did you mean --aligned (learner.aligned)",
        id="learner.alinged-did-you-mean",
    ),
    pytest.param(
        {"learner.optimizer.rounding": "stochastic"},
        "rounding 'stochastic' is for 16-bit masters",
        id="rounding-stochastic-is-for",
    ),
    pytest.param(
        {"learner.objective.name": "sapo", "learner.objective.tau": "2"},
        "--learner.objective.tau",
        id="learner.objective.tau",
    ),
    pytest.param(
        {"learner.correction.name": "none", "learner.correction.cap": "2"},
        "'cap' … token_tis, …'none'",
        id="cap-token_tis-none",
    ),
    pytest.param(
        {"learner.correction.name": "geometric", "learner.correction.ratio_from": "sampler"},
        "'ratio_from' … none, token_mis,… 'geometric'",
        id="ratio_from-none-token_mis-geometric",
    ),
    pytest.param(
        {"learner.objective.name": "on_policy"},
        "learner.mini_batches is 2; set it to 1",
        id="learner.mini_batches-is-2-set",
    ),
    pytest.param(
        {"learner.ratio_fix": "shadow_forward"},
        "ratio_fix 'shadow_forward' … learner.aligned true",
        id="ratio_fix-shadow_forward-learner.aligned-true",
    ),
    pytest.param(
        {
            "learner.objective.name": "on_policy",
            "learner.mini_batches": "1",
            "learner.correction.name": "none",
            "learner.correction.ratio_from": "sampler",
        },
        "'on_policy' …ratio_from 'sampler'",
        id="on_policy-ratio_from-sampler",
    ),
    pytest.param(
        {"learner.lora.rank": "8"},
        "'rank' … lora, … 'none'…or give --learner.lora.name lora",
        id="rank-lora-none-or",
    ),
    pytest.param(
        {
            "learner.lora.name": "lora",
            "learner.master_dtype": "bfloat16",
            "learner.optimizer.rounding": "nearest",
        },
        "rounding 'nearest' … LoRA",
        id="rounding-nearest-LoRA",
    ),
    pytest.param({"learner.lora.name": "dora"}, "'dora' … none, lora", id="dora-none-lora"),
    pytest.param(
        {"learner.lora.name": "lora", "learner.lora.rank": "0"},
        "learner.lora.rank 0 … equal to 1",
        id="learner.lora.rank-0-equal-to",
    ),
    pytest.param(
        {"learner.lora.name": "lora", "learner.lora.dropout": "0.1"},
        "--learner.lora.dropout",
        id="learner.lora.dropout",
    ),
    pytest.param(
        {"learner.lora.name": "lora", "learner.lora.targets": "*.q_proj,first:x"},
        "LoRA target 'first:x' … write first:1",
        id="LoRA-target-first-x",
    ),
    pytest.param(
        {"learner.lora.name": "lora", "learner.lora.targets": "re:("},
        "LoRA target 're:('",
        id="LoRA-target-re",
    ),
    pytest.param(
        {"learner.lora.name": "lora", "learner.lora.targets": "*.q_proj,"},
        "LoRA target ''",
        id="LoRA-target",
    ),
    pytest.param(
        {"quantization.init": "gptq"},
        "init 'gptq' …scale 'kept', not 'minmax'",
        id="init-gptq-scale-kept",
    ),
    pytest.param(
        {"learner.keep_kernel_layout": "false"},
        "keep_kernel_layout false, but … an engine in its process…rollout.servers",
        id="keep_kernel_layout-false-but-an",
    ),
    pytest.param(
        {"quantization.kv_cache": "fp8", "scheme": "bf16"},
        "kv_cache 'fp8' with scheme 'bf16'… low-bit scheme",
        id="kv_cache-fp8-with-scheme",
    ),
    pytest.param(
        {"quantization.scale": "kept", "quantization.init": "gptq", "learner.kl.name": "k3"},
        "init 'gptq' with learner.kl.name 'k3'",
        id="init-gptq-with-learner.kl.name",
    ),
    pytest.param(
        {"quantization.scale": "kept", "quantization.init": "gptq", "learner.lora.name": "lora"},
        "init 'gptq' with learner.lora.name 'lora'",
        id="init-gptq-with-learner.lora.name",
    ),
    pytest.param(
        {"learner.reduce_dtype": "bfloat16", "learner.lora.name": "lora"},
        "reduce_dtype 'bfloat16' is of masters that processes share",
        id="reduce_dtype-bfloat16-with-lora",
    ),
    pytest.param(
        {"bitwise": "true", "learner.aligned": "false"},
        "learner.aligned false multiplies other weights",
        id="learner.aligned-false-multiplies-other",
    ),
    pytest.param(
        {"layers": "=w8a8"},
        "layer rule '=w8a8' needs a pattern and a scheme: PATTERN=SCHEME",
        id="layer-rule-w8a8-needs",
    ),
    pytest.param(
        {"layers": "*.down_proj="},
        "layer rule '*.down_proj=' needs a pattern and a scheme: PATTERN=SCHEME",
        id="layer-rule-.down_proj-needs",
    ),
    pytest.param(
        {"quantization.scale": "kept", "quantization.init": "gptq", "layers": "*.down_proj=w8a8"},
        "init 'gptq' with layers *.down_proj=w8a8",
        id="init-gptq-with-layers",
    ),
    pytest.param(
        {"use_vllm": "", "learner.beta": "0"},
        "--use_vllm (vLLM always samples); unknown …mean --learner.kl.coefficient",
        id="use_vllm-vLLM-always-samples",
    ),
]


@pytest.mark.parametrize(("overrides", "named"), WRONG_VALUES)
def test_wrong_values_are_quoted(overrides: dict[str, str], named: str):
    with pytest.raises(ConfigError, match=pattern(named)):
        load_config(config_file("tiny-qwen3"), overrides)


def test_names_of_other_trainers_lead_to_fields():
    assert {*OTHER_TRAINERS_OPTIONS.values()} <= {*field_paths()}
    assert not {*OTHER_TRAINERS_OPTIONS, *OPTIONS_WITHOUT_FIELD} & {*FLAGS}
    assert not {*OTHER_TRAINERS_OPTIONS} & {*OPTIONS_WITHOUT_FIELD}


STOP_TEXTS = [
    ("###", ["###"]),
    ("a # b", ["a # b"]),
    ("['#', b]", ["#", "b"]),
    ("[INST]", ["[INST]"]),
    ("[]", []),
]


@pytest.mark.parametrize(("text", "stop"), STOP_TEXTS)
def test_a_text_that_ends_a_completion_may_stand_by_itself(text: str, stop: list[str]):
    assert load_config(None, {"rollout.stop": text}).rollout.stop == tuple(stop)


def test_objectives_bring_their_own_defaults():
    """Correction and aggregation follow the objective where they are not named, and stay where they
    are. Naming another objective than the file drops the file's options, which were for the other;
    so does naming another correction.
    """
    file = config_file("tiny-qwen3")
    assert load_config(None, {}).learner.correction.name == "geometric"
    grpo = load_config(file, {"learner.objective.name": "grpo"}).learner
    assert grpo.objective.model_dump() == {
        "name": "grpo",
        "clip_low": 0.2,
        "clip_high": 0.2,
    }
    assert grpo.correction.name == "token_tis"
    assert grpo.aggregation.name == "seq-mean-token-mean"
    same = load_config(file, {"learner.objective.name": "tbpo"}).learner
    assert same.objective.model_dump()["epsilon_high"] == 0.1
    dapo = load_config(
        file, {"learner.objective.name": "dapo", "learner.correction.cap": "3"}
    ).learner
    assert dapo.correction.model_dump() == {"name": "token_tis", "cap": 3.0}
    assert dapo.aggregation.name == "token-mean"
    bypass = load_config(file, {"learner.objective.name": "pg_seq_is"}).learner
    assert bypass.correction.model_dump() == {"name": "none", "ratio_from": "sampler"}
    paper = config_file("paper/qwen3-8b-base")
    masked = load_config(paper, {"learner.correction.name": "sequence_mis"}).learner
    assert masked.correction.model_dump() == {
        "name": "sequence_mis",
        "cap": 2.0,
        "floor": 0.0,
        "ratio_from": "learner",
    }
    assert (
        load_config(paper, {"learner.objective.name": "tbpo"}).learner
        == load_config(paper, {}).learner
    )
    baseline = load_config(paper, {"learner.objective.name": "grpo"}).learner
    assert baseline.correction.model_dump() == grpo.correction.model_dump()
    both = {
        "learner.objective.name": "pg_seq_is",
        "learner.correction.name": "geometric",
    }
    assert load_config(paper, both).learner.correction.name == "geometric"


@pytest.mark.parametrize(
    "name", [name for section in get_args(AnyObjective) for name in section.names()]
)
def test_a_configuration_round_trips_as_a_run_folder_writes_it(tmp_path: Path, name: str):
    own = {"learner.objective.function": "mine.py:objective"} if name == "own" else {}
    options = {
        "learner.optimizer.lr": "3e-4",
        "task.options.min_digits": "2",
        "learner.mini_batches": "1",
        **own,
    }
    config = load_config(config_file("tiny-qwen3"), {"learner.objective.name": name, **options})
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    assert load_config(tmp_path / "c.yaml", {}) == config
    assert (config.learner.optimizer.lr, config.task.options["min_digits"]) == (3e-4, 2)


WRONG_FILES = [
    pytest.param(None, "cannot read configuration", id="cannot-read-configuration"),
    pytest.param("- 1\n", "must hold keys and values, not a list", id="must-hold-keys-and"),
    pytest.param("a: [\n", "is not YAML", id="is-not-YAML"),
    pytest.param(
        "learner:\n",
        "learner is empty; it is a section: give its fields, such as learner.aligned",
        id="learner-is-empty-it",
    ),
    pytest.param(
        "learner:\n  objective: grpo\n",
        "learner.objective 'grpo' is not a mapping",
        id="learner.objective-grpo-is-no",
    ),
    pytest.param(
        "learner:\n  optimizer:\n    betas: [0.9]\n",
        "betas [0.9] must have item 2 too",
        id="betas-0.9-must-have",
    ),
    pytest.param("café: 1\n", "unknown key 'caf", id="unknown-key-caf"),
    pytest.param(
        "seed: 1\nsteps: 2\nseed: 3\n",
        "key 'seed' is given twice, in lines 1 and 3",
        id="key-seed-is-given",
    ),
    pytest.param(
        "rollout: {top_p: 0.9}",
        "rollout.top_p: a policy is trained on completions of its whole distribution",
        id="rollout.top_p-a-policy-is",
    ),
    pytest.param(
        "rollout: {servers: ['http://a:1', 'http://a:1']}",
        "names no server, or one twice",
        id="names-no-server-or",
    ),
    pytest.param(
        "learner: {optimzer: {lr: 1}}",
        "'learner.optimzer' in …c.yaml; did you mean learner: {optimizer: {lr: …}}",
        id="learner.optimzer-in-c.yaml-did",
    ),
    pytest.param(
        "learner.optimizer.lr: 1\nbeta: 1\n",
        "'learner.optimizer.lr' in … did you mean …; unknown key 'beta' …kl: ",
        id="learner.optimizer.lr-in-did-you",
    ),
]


@pytest.mark.parametrize(("text", "message"), WRONG_FILES)
def test_wrong_files_are_refused(tmp_path: Path, text: str | None, message: str):
    if text is not None:
        (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ConfigError, match=pattern(message)):
        load_config(tmp_path / "c.yaml", {})


def test_functions_say_where_they_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    kind = FunctionKind("reward", "takes nothing", ConfigError)
    texts = (
        "",
        "from mine_2 import reward\n",
        "def reward(): return 7\n",
        "import nowhere\n",
        "1 / 0",
        "assert 0",
    )
    for number, text in enumerate(texts):
        (tmp_path / f"mine_{number}.py").write_text(text)
    assert load_function(kind, f"{tmp_path}/mine_1.py:reward")() == 7
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ConfigError,
        match=r"importing it raised Mod.*mine_3\.py, line 1, in <module>\)$",
    ):
        load_function(kind, "mine_3:reward")
    for name, said in (
        ("mine_4", r"raised ZeroDivisionError: div.*zero \("),
        ("mine_5", r"raised AssertionError \(/"),
    ):
        with pytest.raises(ConfigError, match=said):
            load_function(kind, f"{name}:reward")
    with pytest.raises(ConfigError, match="there is no module 'mine_6'"):
        load_function(kind, "mine_6:reward")


def test_an_interrupted_write_leaves_no_file(tmp_path: Path):
    target = tmp_path / "a"
    building = tmp_path / "a.part"
    for before in (
        building.mkdir,
        lambda: building.write_text("of a process that died"),
    ):
        before()
        with pytest.raises(IsADirectoryError), written_aside(target) as path:
            path.write_bytes(tmp_path.read_bytes())
        assert not target.exists()
        assert not building.exists()
    assert disk_error(Exception("No space left (os error 28)"))
    assert not disk_error(Exception("(os error 2)"))


def test_numbers_are_text_where_text_is_meant(tmp_path: Path):
    (tmp_path / "c.yaml").write_text("output: 2026\nmodel: 7\n")
    config = load_config(tmp_path / "c.yaml", {"task.name": "1e3"})
    assert config.output == "2026"
    assert config.model == "7"
    assert config.task.name == "1e3"
    assert load_config(None, {"output": "null"}).output is None


NUMBERS = [
    "task: {name: q.csv, <<: {system: a}, options: {p: 1e-3, q: 010, s: -08, r: 1:30}}",
    "learner: {objective: {epsilon_high: 0.1}}",
]


@pytest.mark.parametrize("named", [{}, {"task.name": "./q.csv", "learner.objective.name": "tbpo"}])
def test_numbers_are_a_persons_and_the_files_own_name_keeps_its_options(
    tmp_path: Path, named: dict[str, str]
):
    (tmp_path / "c.yaml").write_text("\n".join(NUMBERS))
    config = load_config(tmp_path / "c.yaml", {**named, "seed": "010"})
    assert config.task.options == {"p": 1e-3, "q": 10, "s": -8, "r": "1:30"}
    assert config.seed == 10
    assert config.task.system == "a"
    assert config.learner.objective.model_dump()["epsilon_high"] == 0.1


def test_the_default_file_follows_the_model():
    """Contract: each of the paper's models has its own file."""
    files = {name for name in shipped_names() if name.startswith("paper/")}
    assert {f"paper/{model.split('/')[1].lower()}" for model in PAPER} == files
    assert default_config(None).name == "tiny-qwen3.yaml"
    assert default_config("tiny-qwen3").name == "tiny-qwen3.yaml"
    assert default_config("Qwen/Qwen3-30B-A3B-Base").stem == "qwen3-30b-a3b-base"
    assert default_config("./copies/Qwen2.5-Math-7B/").stem == "qwen2.5-math-7b"
    assert default_config("Qwen/Qwen3-1.7B-Base") == config_file("paper/qwen3-8b-base")


CHANGED = {
    "model": ["model", "x/y", {}],
    "scheme": ["scheme", "w8a8", {}],
    "layers": ["layers", "first:1=bf16", {}],
    "dtype": ["dtype", "float16", {}],
    "seed": ["seed", "3", {}],
    "from_rollouts": [
        "from_rollouts",
        "b",
        {"from_rollouts": "a", "eval.problems": "0", "export": "false"},
    ],
    "rollout.prompts": ["rollout.prompts", "16", {}],
    "rollout.samples": ["rollout.samples", "4", {}],
    "rollout.max_new_tokens": ["rollout.max_new_tokens", "9", {}],
    "rollout.temperature": ["rollout.temperature", "0.8", {}],
    "rollout.stop": ["rollout.stop", "['###']", {}],
    "rollout.loop_limit": ["rollout.loop_limit", "32", {}],
    "rollout.dynamic_sampling": ["rollout.dynamic_sampling", "2", {}],
    "rollout.tensor_parallel_size": ["rollout.tensor_parallel_size", "2", {}],
    "rollout.max_staleness": ["rollout.max_staleness", "1", {"rollout.servers": "1"}],
    "learner.aligned": ["learner.aligned", "false", {}],
    "learner.compute_dtype": ["learner.compute_dtype", "float32", {"learner.aligned": "false"}],
    "learner.compile": ["learner.compile", "true", {}],
    "learner.input_gradients": ["learner.input_gradients", "exact", {}],
    "learner.master_dtype": ["learner.master_dtype", "bfloat16", {}],
    "learner.optimizer.name": ["learner.optimizer.name", "adamw", {}],
    "learner.optimizer.rounding": [
        "learner.optimizer.rounding",
        "stochastic",
        {"learner.master_dtype": "bfloat16"},
    ],
    "learner.lora": ["learner.lora.name", "lora", {}],
    "quantization": ["quantization.scale", "kept", {}],
    "task": ["task.reward", "m:f", {}],
}
"""The field → what another value of it is, and what both runs need for the field to be allowed."""


@pytest.mark.parametrize("path", CHANGED)
def test_a_resumed_run_keeps_what_fixes_it(path: str):
    assert set(FIXED_FIELDS) == CHANGED.keys()
    field, value, both = CHANGED[path]
    file = config_file("tiny-qwen3")
    with pytest.raises(
        ConfigError,
        match=f"started with {field.replace('.', chr(92) + '.')} .* cannot be resumed",
    ):
        resumed_config(load_config(file, both), load_config(file, both | {field: value}))
    longer = load_config(file, {"steps": "999", "task.time_limit": "9", "task.on_error": "none"})
    assert resumed_config(load_config(file, {}), longer) == longer


def test_a_users_home_may_begin_a_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Contract: `~` is expanded in files and options wherever a path is expected; plain text keeps
    its tilde.
    """
    monkeypatch.setenv("HOME", "/me")
    (tmp_path / "c.yaml").write_text(
        "model: ~/m\noutput: ~/runs\ntask: {name: hf:~/d, system: ~/text}\n"
    )
    config = load_config(
        tmp_path / "c.yaml",
        {"task.reward": "~/a.py:f=0.5, ~/b~.py:g", "rollout.servers": "1"},
    )
    assert config.model == "/me/m"
    assert config.output == "/me/runs"
    assert config.task.name == "hf:/me/d"
    assert config.task.reward == "/me/a.py:f=0.5, /me/b~.py:g"
    assert config.task.system == "~/text"
