"""What vLLM's server classes make of plain requests to an export: the run's own requests."""

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from qarl.configs.load import config_file, load_config
from qarl.configs.schema.run import RunConfig
from qarl.embedded.tokenizer import CHAT_TEMPLATE
from qarl.quant.checkpoint.folder import end_tokens
from qarl.rollout.servers.vllm.chat import (
    EngineRequest,
    request_fields,
    sampled_requests,
    served_requests,
)
from qarl.rollout.types import RequestDefaults, Sampling
from qarl.run.prompts import Prompter, open_prompter
from qarl.run.request_defaults import all_problems, request_defaults
from qarl.sync.request_defaults import write_defaults
from qarl.tasks import Problem, load_task
from tests.support import Policies

THINKING = (
    CHAT_TEMPLATE
    + "{% if enable_thinking is defined and enable_thinking is false %}0 = 0\n{% endif %}"
    "{{ style }}"
)
PARTS = CHAT_TEMPLATE.replace(
    "{{ message['content'] }}",
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in"
    " message['content'] %}{{ part['text'] }}{% endfor %}{% endif %}",
)
"""A template that reads contents as lists of parts, which vLLM's server then gives it."""
SAMPLING = {"repetition_penalty": 1.5, "temperature": 0.2, "top_k": 2, "max_new_tokens": 3}
QUESTIONS = [Problem(f"{n}", f"{n} + 3 =", "") for n in range(3)]

CASES = {
    "nothing": (CHAT_TEMPLATE, {}),
    "system": (CHAT_TEMPLATE, {"task.system": "Be brief."}),
    "system in parts": (PARTS, {"task.system": 'Say "1"\n{{ 2 }}, {% if %} \\n é😀.'}),
    "arguments": (THINKING, {"task.template.enable_thinking": "false", "task.template.style": "x"}),
    "both": (THINKING, {"task.system": "Be brief.", "task.template.enable_thinking": "false"}),
    "stop and loops": (CHAT_TEMPLATE, {"rollout.stop": "[x, y]", "rollout.loop_limit": "4"}),
    "special stop": (CHAT_TEMPLATE, {"rollout.stop": "['<|endoftext|>', x]"}),
    "sampled": (THINKING, {"eval.temperature": "0.6", "eval.top_p": "0.9", "eval.top_k": "5"}),
}


def export_of(
    base: Path,
    folder: Path,
    template: str | None,
    fields: dict[str, str],
):
    """Write a base with that template and with sampling of its own, and an export's files beside.

    Returns the export's folder, the run's configuration and how the run asked.
    """
    source = Path(shutil.copytree(base, folder / "base"))
    (source / "chat_template.jinja").unlink(missing_ok=True)
    file = source / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": template}))
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, **SAMPLING}))
    config = load_config(config_file("tiny-qwen3"), {"model": str(source), **fields})
    prompter = open_prompter(source, config.rollout, config.task)
    defaults = request_defaults(config, prompter.tokenizer, all_problems(load_task(config.task)))
    export = Path(shutil.copytree(source, folder / "export"))
    write_defaults(export, {}, defaults)
    return export, config, prompter, defaults


def evaluated(config: RunConfig, prompter: Prompter) -> list[EngineRequest]:
    """Return the requests of the evaluation by an engine of the folder that the prompter is of."""
    tokenizer = prompter.tokenizer
    system = config.task.system
    problems = QUESTIONS if system is None else [p.with_system_prompt(system) for p in QUESTIONS]
    prompts = [prompter.prompt(problem) for problem in problems]
    sampling = Sampling.of(config.rollout, 0, evaluation=config.eval).with_stop_tokens(tokenizer)
    ends = end_tokens(Path(tokenizer.name_or_path)) | {tokenizer.eos_token_id}
    return sampled_requests(prompts, sampling, ends)


def served(folder: Path, config: RunConfig, fields: dict) -> list[EngineRequest | str]:
    bodies = [{"messages": problem.chat, **fields} for problem in QUESTIONS]
    return asked(folder, config, bodies)


def asked(
    folder: Path,
    config: RunConfig,
    bodies: list[dict],
) -> list[EngineRequest | str]:
    """Return what a server of a folder makes of requests."""
    own = AutoTokenizer.from_pretrained(folder).eos_token_id
    ends = end_tokens(folder) | {own}
    return served_requests(folder, config.dtype, config.rollout.longest, bodies, ends)


@pytest.mark.parametrize("case", CASES)
def test_a_server_asks_an_export_as_its_run_did(random_policy: Policies, tmp_path: Path, case: str):
    """Contract: prompt tokens and sampling parameters of plain requests are the evaluation's, and
    those of a run that goes on from the export, which gives system prompt and arguments itself.
    """
    export, config, prompter, defaults = export_of(random_policy(True), tmp_path, *CASES[case])
    expected = evaluated(config, prompter)
    assert served(export, config, request_fields(defaults)) == expected
    again = open_prompter(export, config.rollout, config.task)
    assert evaluated(config, again) == expected


def test_a_model_without_template_is_asked_by_completions(random_policy: Policies, tmp_path: Path):
    export, config, prompter, defaults = export_of(random_policy(True), tmp_path, None, {})
    bodies = [{"prompt": problem.question, **request_fields(defaults)} for problem in QUESTIONS]
    found = asked(export, config, bodies)
    assert found == evaluated(config, prompter)
    (refused,) = asked(export, config, [{"messages": QUESTIONS[0].chat}])
    assert isinstance(refused, str) and "chat template" in refused


def test_a_difference_names_itself(random_policy: Policies, tmp_path: Path):
    """Check that each part of the record is needed: what the base says by itself is something else,
    and what a client says takes precedence.
    """
    fields = {"task.system": "Be brief.", "task.template.style": "x"}
    export, config, prompter, _ = export_of(random_policy(True), tmp_path, THINKING, fields)
    first = evaluated(config, prompter)[0]
    base = export.with_name("base")

    def difference(folder: Path, **body) -> str | None:
        body = {"messages": QUESTIONS[0].chat, "temperature": 0, **body}
        (found,) = asked(folder, config, [body])
        return found if isinstance(found, str) else first.difference(found)

    assert difference(export) is None
    assert "the prompts" in str(difference(base))
    assert "the prompts" in str(difference(export, chat_template_kwargs={"style": "y"}))
    own = [{"role": "system", "content": "Be long."}, *QUESTIONS[0].chat]
    assert "the prompts" in str(difference(export, messages=own))
    assert difference(export, max_tokens=5) == "max_tokens is 8 and 5"
    defaults = [{"role": "system", "content": "Be brief."}, *QUESTIONS[0].chat]
    arguments = {"style": "x"}
    assert (
        difference(base, messages=defaults, chat_template_kwargs=arguments)
        == "repetition_penalty is 1.0 and 1.5"
    )


def test_the_record_says_one_system_prompt_or_none():
    behind = [problem.with_system_prompt("Add.") for problem in QUESTIONS]
    plain = type("Tokenizer", (), {"chat_template": "x", "eos_token_id": 2})
    config = load_config(config_file("tiny-qwen3"), {})
    assert request_defaults(config, plain, behind).system == "Add."
    assert request_defaults(config, plain, [*behind, QUESTIONS[0]]).system is None
    assert request_defaults(config, plain, QUESTIONS).system is None
    assert request_fields(RequestDefaults(sampling={"temperature": 0.6}, stop=("x",))) == {
        "stop": ["x"]
    }
