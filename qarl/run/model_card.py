"""The model card of an export: README.md, which says to people and to the Hub what qarl.json says.

A section of the card is a function from the note to text in `_SECTIONS`; empty text is left out.
"""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import yaml

from qarl.configs.schemes import SCHEME_SPECS, UNQUANTIZED
from qarl.evaluation.heldout import heldout
from qarl.quant.checkpoint.folder import tensor_shapes
from qarl.quant.runtime.libraries import INT4_AS_W4A8
from qarl.rollout.servers.vllm.chat import request_fields
from qarl.run.export_note import noted_defaults, read_note
from qarl.tasks.rows import HUB, short_name

_CARD = "README.md"


def write_card(export: Path) -> None:
    """Write the card of an export from its qarl.json."""
    note = read_note(export)
    sections = [section(note) for section in _SECTIONS] + [_on_cpus(note, export)]
    body = "\n\n".join([f"# {note['run']}", *filter(None, sections)])
    (export / _CARD).write_text(f"{_front_matter(note)}\n{body}\n", encoding="utf-8")


def _front_matter(note: dict[str, Any]) -> str:
    # A base without an owner is the name of a folder or an embedded policy.
    quantized = note["scheme"] != UNQUANTIZED
    relation = {"base_model_relation": "quantized" if quantized else "finetune"}
    hub = {"base_model": note["base"], **relation} if "/" in note["base"] else {}
    name = note["task"]["name"]
    data = re.fullmatch(rf"{HUB}([\w.-]+/[\w.-]+)", name)
    tree = {
        **hub,
        **note["licence"],
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": [
            "qarl",
            "supervised-fine-tuning" if "sft" in note else "reinforcement-learning",
            *(["compressed-tensors", note["scheme"]] if quantized else []),
        ],
        **({"quantized_by": "qarl"} if quantized else {}),
        **({"datasets": [data[1]]} if data else {}),
        **_measured(note, data[1] if data else short_name(name)),
    }
    return f"---\n{yaml.safe_dump(tree, sort_keys=False)}---\n"


def _measured(note: dict[str, Any], dataset: str) -> dict[str, Any]:
    """Return the Hub's `model-index` with the held-out figure, or nothing if there is none."""
    measured = heldout(note)
    if measured is None:
        return {}
    kind = "accuracy" if measured.reward is None else "reward"
    details: dict[str, Any] = {}
    if measured.problems is not None:
        details["problems"] = measured.problems
    if measured.reward is None and note.get("heldout_interval"):
        details["interval_95"] = [round(bound, 4) for bound in note["heldout_interval"]]
    metric = {
        "type": kind,
        "name": f"held-out {measured.name}",
        "value": round(measured.score, 4),
        **({"args": details} if details else {}),
    }
    result = {
        "task": {"type": "text-generation"},
        "dataset": {"name": short_name(note["task"]["name"]), "type": dataset},
        "metrics": [metric],
    }
    return {"model-index": [{"name": note["run"], "results": [result]}]}


def _summary(note: dict[str, Any]) -> str:
    scheme = note["scheme"]
    if "sft" in note:
        training = (
            f"fine-tuned on {note['sft']['pairs']} pairs with QaRL as the {scheme} policy it is"
        )
    elif "ptq" in note:
        training = f"quantized to {scheme} by {note['ptq']} after reinforcement learning in bf16"
    else:
        training = f"trained by reinforcement learning with QaRL as the {scheme} policy it is"
    return f"`{note['base']}`, {training}: step {note['step']}."


def _facts(note: dict[str, Any]) -> str:
    return _table(
        {
            "task": short_name(note["task"]["name"]),
            **_heldout(note),
            "scheme": ", ".join([note["scheme"], *note["layers"]]),
            "compute dtype": note["dtype"],
            "keys and values": note.get("kv_cache") or note["dtype"],
            "digest of the weights": f"`{note['digest']}`",
            "versions": ", ".join(f"{name} {each}" for name, each in note["versions"].items()),
        }
    )


def _heldout(note: dict[str, Any]) -> dict[str, str]:
    measured = heldout(note)
    if measured is None:
        return {}
    # the interval is that of the accuracy; a deployable best step has no interval
    interval = note.get("heldout_interval") if measured.reward is None else None
    between = f" [{100 * interval[0]:.1f}, {100 * interval[1]:.1f}]" if interval else ""
    of = "" if measured.problems is None else f" of {measured.problems} problems"
    return {f"held-out {measured.name}": f"{measured.figure}{between}{of}"}


def _questions(note: dict[str, Any]) -> str:
    """Return how the policy was asked in training and evaluation."""
    defaults = noted_defaults(note)
    sampling = ", ".join(f"{name} {value:g}" for name, value in defaults.sampling.items())
    served = note.get("served")
    rows = {
        "template arguments": _code(dict(defaults.template)) if defaults.template else "",
        "evaluation": "greedy" if defaults.greedy else sampling,
        "prompt and new tokens": (
            f"at most {note['max_prompt_tokens']} and {note['max_new_tokens']}"
        ),
        "ends at": _code(list(defaults.stop)) if defaults.stop else "",
        "ends after repetitions": "" if defaults.loop_limit is None else str(defaults.loop_limit),
        "served as evaluated": (
            f"{served['equal']} of {served['questions']} questions" if served else ""
        ),
    }
    system = "Without a system prompt." if defaults.chat else "By the question alone, as no chat."
    if defaults.system is not None:
        quoted = "\n".join(f"    {line}" for line in defaults.system.splitlines() or [""])
        system = f"Behind this system prompt:\n\n{quoted}"
    precedence = (
        "The chat template and `generation_config.json` have these as defaults. A request may give"
        " its own system prompt, template arguments and sampling."
    )
    return f"## How it was asked\n\n{system}\n\n{_table(rows)}\n\n{precedence}"


def _use(note: dict[str, Any]) -> str:
    """Return the commands that serve the export as it was measured, and measure it again."""
    defaults = noted_defaults(note)
    question = {"messages": [{"role": "user", "content": "QUESTION"}]}
    request = {
        "model": "FOLDER",
        **(question if defaults.chat else {"prompt": "QUESTION"}),
        **request_fields(defaults),
    }
    path = "chat/completions" if defaults.chat else "completions"
    length = note["max_prompt_tokens"] + note["max_new_tokens"]
    body = shlex.quote(json.dumps(request, ensure_ascii=False))
    return f"""## Use

`qarl.json` has the same for programs, with the whole task.

```
qarl serve FOLDER
qarl eval FOLDER
vllm serve FOLDER --dtype {note["dtype"]} --max-model-len {length}
curl http://127.0.0.1:8000/v1/{path} -H 'Content-Type: application/json' -d {body}
```"""


def _on_cpus(note: dict[str, Any], export: Path) -> str:
    """Return what vLLM without QaRL cannot do with the export on CPUs; "" if nothing is known.

    Measured with vLLM 0.32 (docs/guide/serving.md).
    """
    if any(".experts." in name and name.endswith("_scale") for name in tensor_shapes(export)):
        return (
            "On CPUs `vllm serve` without QaRL has kernels for int8 and int4 experts alone, if the"
            " CPU has AMX, and rounds the activations of int4 experts to int8. Otherwise it does"
            " not start. `qarl serve` has kernels of its own."
        )
    if _has_int4(note, with_activations=True):
        return (
            "On CPUs with AMX `vllm serve` without QaRL ends by an illegal instruction; `qarl"
            " serve` does not."
        )
    if not _has_int4(note, with_activations=False):
        return ""
    activations = ""
    if note["dtype"] == "bfloat16":
        # vLLM 0.32 uses AMX's tiles there without asking the kernel for them
        activations = (
            " With AMX it rounds activations to int8, which these weights were not measured with;"
            f" `{INT4_AS_W4A8}=0` ends it by an illegal instruction."
        )
    return (
        "On CPUs `vllm serve` without QaRL needs AVX-512 for these weights: without AVX-512 the"
        f" server starts, and every request fails.{activations} `qarl serve` has kernels of its"
        " own."
    )


def _has_int4(note: dict[str, Any], with_activations: bool) -> bool:
    """Return whether layers have int4 weights that CPUs multiply, and activations in codes or not.

    with_activations: whether activations have codes (w4a8), or the compute dtype (w4a16).
    """
    names = {note["scheme"], *(rule.rpartition("=")[2] for rule in note["layers"])}
    specs = [SCHEME_SPECS[name] for name in names if name in SCHEME_SPECS]
    return any(
        spec.weights is not None
        and (spec.weights.kind, spec.weights.bits) == ("int", 4)
        and spec.only in ("", "CPUs")
        and (spec.activations is not None) == with_activations
        for spec in specs
    )


_SECTIONS = (_summary, _facts, _questions, _use)


def _table(rows: dict[str, str]) -> str:
    lines = (f"| {name} | {value} |" for name, value in rows.items() if value)
    return "\n".join(["| | |", "|---|---|", *lines])


def _code(value: Any) -> str:
    """Return a value as inline code that a table can hold."""
    return f"`{json.dumps(value, ensure_ascii=False).replace('|', chr(92) + '|')}`"
