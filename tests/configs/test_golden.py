"""Ranges of the configuration's fields, and codes and bytes of the schemes.

A change of them changes the meaning of existing configuration files. Defaults, choices and names
are compared with docs/reference/options.md by tests/qarl/test_docs.py.
"""

import dataclasses
from typing import Any

import pytest

from qarl.configs import errors
from qarl.configs.load import config_file, load_config
from qarl.configs.schema.base import pattern_fault
from qarl.configs.schema.run import RunConfig
from qarl.configs.schemes import SCHEME_SPECS
from qarl.configs.words import few, quoted, sized

SYMBOLS = {
    "minimum": ">=",
    "exclusiveMinimum": ">",
    "maximum": "<=",
    "exclusiveMaximum": "<",
    "minLength": "length >=",
    "minItems": "items >=",
    "maxItems": "items <=",
}
"""Keyword of a JSON schema → its symbol in `RANGES`."""
TRANSPARENT = ("$defs", "properties", "anyOf", "items")
"""Keywords of a JSON schema that `RANGES` leaves out of a field's path."""
RANGES = {
    "CheckpointConfig.every": ">= 1",
    "CheckpointConfig.keep": ">= 1",
    "CispoConfig.ratio_cap": ">= 1",
    "DapoConfig.clip_low": "> 0, < 1",
    "DapoConfig.clip_high": "> 0",
    "DualClipConfig.clip_low": "> 0, < 1",
    "DualClipConfig.clip_high": "> 0",
    "DualClipConfig.dual_clip": "> 1",
    "EvalConfig.problems": ">= 0, <= 1000000",
    "EvalConfig.every": ">= 1",
    "EvalConfig.samples": ">= 1, <= 10000",
    "EvalConfig.temperature": ">= 0, <= 2",
    "EvalConfig.top_p": "> 0, <= 1",
    "EvalConfig.top_k": ">= 0",
    "EvalConfig.min_p": ">= 0, < 1",
    "GrpoConfig.clip_low": "> 0, < 1",
    "GrpoConfig.clip_high": "> 0",
    "GspoConfig.clip_low": "> 0, < 1",
    "GspoConfig.clip_high": "> 0",
    "GspoDualClipConfig.clip_low": "> 0, < 1",
    "GspoDualClipConfig.clip_high": "> 0",
    "GspoDualClipConfig.dual_clip": "> 1",
    "KlConfig.coefficient": "> 0",
    "LearnerConfig.mini_batches": ">= 1",
    "LearnerConfig.micro_batch_tokens": ">= 1",
    "LearnerConfig.logprob_chunk_tokens": ">= 1",
    "LearnerConfig.router_aux_loss": ">= 0",
    "LearnerConfig.deepspeed": "length >= 1",
    "LearnerConfig.diagnostics_every": ">= 0",
    "LoraConfig.rank": ">= 1",
    "LoraConfig.alpha": "> 0",
    "OptimizerConfig.lr": "> 0, <= 1",
    "OptimizerConfig.weight_decay": ">= 0, <= 1",
    "OptimizerConfig.grad_clip": "> 0",
    "OptimizerConfig.warmup_steps": ">= 0",
    "OptimizerConfig.decay_steps": ">= 0",
    "OptimizerConfig.betas": "items >= 2, items <= 2",
    "OptimizerConfig.betas.prefixItems": ">= 0, < 1",
    "OptimizerConfig.momentum": ">= 0, < 1",
    "OwnConfig.function": "length >= 1",
    "PositiveGrpoConfig.clip_high": "> 0",
    "RolloutConfig.pictures": ">= 0, <= 1024",
    "RolloutConfig.prompts": ">= 1, <= 1000000",
    "RolloutConfig.samples": ">= 2, <= 10000",
    "RolloutConfig.max_prompt_tokens": ">= 1, <= 16777216",
    "RolloutConfig.max_new_tokens": ">= 1, <= 16777216",
    "RolloutConfig.temperature": "> 0, <= 2",
    "RolloutConfig.stop": "length >= 1",
    "RolloutConfig.loop_limit": ">= 2",
    "RolloutConfig.max_num_seqs": ">= 1, <= 1000000",
    "RolloutConfig.kv_cache_gib": ">= 1",
    "RolloutConfig.dynamic_sampling": ">= 0",
    "RolloutConfig.tensor_parallel_size": ">= 1, <= 64",
    "RolloutConfig.server_key_file": "length >= 1",
    "RolloutConfig.server_folder": "length >= 1",
    "RolloutConfig.server_seconds": "> 0",
    "RolloutConfig.server_full_every": ">= 1",
    "RolloutConfig.max_staleness": ">= 0, <= 16",
    "SapoConfig.tau_positive": "> 0",
    "SapoConfig.tau_negative": "> 0",
    "SeqSumAggregation.constant": "> 0",
    "SequenceMisConfig.cap": ">= 1",
    "SequenceMisConfig.floor": ">= 0, < 1",
    "SyncConfig.canary_every": ">= 1",
    "SyncConfig.canary_bound": "> 0",
    "SyncConfig.gate_bound": "> 0",
    "TaskConfig.name": "length >= 1",
    "TaskConfig.prompt": "length >= 1",
    "TaskConfig.answer": "length >= 1",
    "TaskConfig.data": "length >= 1",
    "TaskConfig.subset": "length >= 1",
    "TaskConfig.split": "length >= 1",
    "TaskConfig.heldout": "length >= 1",
    "TaskConfig.system": "length >= 1",
    "TaskConfig.reward": "length >= 1",
    "TaskConfig.correct": "length >= 1",
    "TaskConfig.rollout": "length >= 1",
    "TaskConfig.environment": "length >= 1",
    "TaskConfig.tool_parser": "length >= 1",
    "TaskConfig.time_limit": "> 0, <= 1000000",
    "TaskConfig.memory_limit": "> 0",
    "TbpoConfig.epsilon_high": "> 0",
    "TbpoConfig.delta_high": "> 0",
    "TbpoConfig.delta_low": "> 0, < 1",
    "TokenMisConfig.cap": ">= 1",
    "TokenMisConfig.floor": ">= 0, < 1",
    "TruncatedConfig.cap": ">= 1",
    "model": "length >= 1",
    "steps": ">= 1, <= 1000000000",
    "seed": ">= 0, <= 9223372036854775807",
    "record": ">= 0, <= 1000000",
    "from_rollouts": "length >= 1",
    "output": "length >= 1",
}
"""Field → its range. Fields that are not listed have none."""


def ranges(node: Any, path: str = "") -> dict[str, str]:
    """Return the range of each field of a JSON schema by the field's path."""
    if isinstance(node, list):
        return {field: limits for item in node for field, limits in ranges(item, path).items()}
    if not isinstance(node, dict):
        return {}
    limits = [f"{symbol} {node[key]}" for key, symbol in SYMBOLS.items() if key in node]
    collected = {path: ", ".join(limits)} if limits else {}
    for key, item in node.items():
        child = path if key in TRANSPARENT else f"{path}.{key}".lstrip(".")
        collected |= ranges(item, child)
    return collected


def test_fields_have_their_ranges():
    assert ranges(RunConfig.model_json_schema()) == RANGES


def test_every_section_refuses_unknown_keys():
    schema = RunConfig.model_json_schema()
    for section in (schema, *schema["$defs"].values()):
        assert section["additionalProperties"] is False, section["title"]


OWN_DEFAULTS = {
    "steps": 200,
    "task.options": {},
    "task.reward": None,
    "rollout.prompts": 32,
    "rollout.max_prompt_tokens": 1024,
    "rollout.max_new_tokens": 1024,
    "rollout.max_num_seqs": 256,
    "learner.objective.epsilon_high": 0.0004,
    "learner.objective.delta_high": 0.0007,
    "learner.objective.delta_low": 0.0003,
    "learner.optimizer.lr": 1e-06,
    "learner.optimizer.decay_steps": 0,
    "learner.mini_batches": 4,
    "eval.problems": 256,
    "eval.every": 50,
}
"""Field that the embedded model's file sets → its default without a file."""


def flattened(node: Any, path: str = "") -> dict[str, Any]:
    """Return the leaves of nested mappings by their dotted paths."""
    if not isinstance(node, dict) or not node:
        return {path: node}
    leaves: dict[str, Any] = {}
    for key, item in node.items():
        leaves |= flattened(item, f"{path}.{key}".lstrip("."))
    return leaves


def test_defaults_without_a_file_differ_from_the_embedded_models_in_these_fields():
    """Contract: other defaults are in docs/reference/options.md, which tests/qarl/test_docs.py
    compares with the code.
    """
    config = load_config(None, {})
    defaults = flattened(config.model_dump(mode="json"))
    embedded = flattened(load_config(config_file("tiny-qwen3"), {}).model_dump(mode="json"))
    differing = {field: value for field, value in defaults.items() if embedded.get(field) != value}
    assert differing == OWN_DEFAULTS
    rollout = config.rollout
    assert rollout.longest == rollout.max_prompt_tokens + rollout.max_new_tokens


SHAPES = (
    (256, 512),
    (256, 96),
    (64, 1000),
    (48, 128),
)
"""Shapes of weights, output features × input features."""
SCHEMES: dict[str, tuple[Any, Any, str, float]] = {
    "bf16": (None, None, "pack-quantized", 2),
    "fp8": (
        ("float", 8, None, 1, "compute", True),
        ("float", 8, None, 1, "compute", True),
        "float-quantized",
        1.0,
    ),
    "fp8-block": (
        ("float", 8, 128, 128, "compute", True),
        ("float", 8, 128, 1, "compute", True),
        "float-quantized",
        1.0,
    ),
    "mxfp4a16": (("float", 4, 32, 1, "power", True), None, "mxfp4-pack-quantized", 2),
    "nvfp4": (
        ("float", 4, 16, 1, "e4m3", True),
        ("float", 4, 16, 1, "e4m3", True),
        "nvfp4-pack-quantized",
        0.5,
    ),
    "nvfp4a16": (("float", 4, 16, 1, "e4m3", True), None, "nvfp4-pack-quantized", 2),
    "w4a16": (("int", 4, 128, 1, "compute", True), None, "pack-quantized", 2),
    "w4a16-channel": (("int", 4, None, 1, "compute", True), None, "pack-quantized", 2),
    "w4a16-g32": (("int", 4, 32, 1, "compute", True), None, "pack-quantized", 2),
    "w4a16-g64": (("int", 4, 64, 1, "compute", True), None, "pack-quantized", 2),
    "w4a8": (
        ("int", 4, 128, 1, "compute", True),
        ("int", 8, None, 1, "compute", False),
        "int-quantized",
        1.0,
    ),
    "w4afp8": (
        ("int", 4, 128, 1, "compute", True),
        ("float", 8, None, 1, "compute", True),
        "pack-quantized",
        1.0,
    ),
    "w8a16": (("int", 8, 128, 1, "compute", True), None, "pack-quantized", 2),
    "w8a8": (
        ("int", 8, None, 1, "compute", True),
        ("int", 8, None, 1, "compute", True),
        "int-quantized",
        1.0,
    ),
}
"""Scheme → the fields of its weights' and activations' grids (kind, bits, columns, rows, scale,
symmetric), its checkpoint format, and bytes an input value.
"""
WEIGHT_BYTES: dict[str, list[tuple[bool, int, int]]] = {
    "bf16": [
        (True, 262144, 524288),
        (True, 49152, 98304),
        (True, 128000, 256000),
        (True, 12288, 24576),
    ],
    "fp8": [(True, 131584, 132096), (True, 25088, 25600), (True, 64128, 64256), (True, 6240, 6336)],
    "fp8-block": [
        (True, 131088, 131104),
        (False, 24576, 24576),
        (False, 64000, 64000),
        (False, 6144, 6144),
    ],
    "mxfp4a16": [
        (True, 69632, 69632),
        (True, 13056, 13056),
        (False, 33984, 33984),
        (True, 3264, 3264),
    ],
    "nvfp4": [
        (True, 73736, 73736),
        (True, 13832, 13832),
        (False, 35976, 35976),
        (True, 3464, 3464),
    ],
    "nvfp4a16": [
        (True, 73732, 73732),
        (True, 13828, 13828),
        (False, 35972, 35972),
        (True, 3460, 3460),
    ],
    "w4a16": [
        (True, 67600, 69648),
        (False, 12304, 12304),
        (False, 32912, 33808),
        (True, 3184, 3280),
    ],
    "w4a16-channel": [
        (True, 66064, 66576),
        (True, 12816, 13328),
        (True, 32144, 32272),
        (True, 3184, 3280),
    ],
    "w4a16-g32": [
        (True, 73744, 81936),
        (True, 13840, 15376),
        (False, 35984, 39952),
        (True, 3472, 3856),
    ],
    "w4a16-g64": [
        (True, 69648, 73744),
        (False, 12816, 13328),
        (False, 33936, 35856),
        (True, 3280, 3472),
    ],
    "w4a8": [
        (True, 133120, 135168),
        (False, 24576, 24576),
        (False, 64896, 65792),
        (True, 6240, 6336),
    ],
    "w4afp8": [
        (True, 67600, 69648),
        (False, 12304, 12304),
        (False, 32912, 33808),
        (True, 3184, 3280),
    ],
    "w8a16": [
        (True, 133136, 135184),
        (False, 24592, 24592),
        (False, 64912, 65808),
        (True, 6256, 6352),
    ],
    "w8a8": [
        (True, 131584, 132096),
        (True, 25088, 25600),
        (True, 64128, 64256),
        (True, 6240, 6336),
    ],
}
"""Scheme → for each of `SHAPES` whether it fits, and its bytes with scales of 2 and 4 bytes."""


@pytest.mark.parametrize("name", SCHEME_SPECS)
def test_schemes_have_their_codes_and_bytes(name: str):
    spec = SCHEME_SPECS[name]
    weights, activations, checkpoint_format, input_bytes = SCHEMES[name]
    fields = dataclasses.asdict(spec)
    assert fields["name"] == name
    assert (fields["weights"] and tuple(fields["weights"].values())) == weights
    assert (fields["activations"] and tuple(fields["activations"].values())) == activations
    assert fields["format"] == checkpoint_format
    assert set(fields) == {"name", "weights", "activations", "format", "only"}
    assert spec.input_bytes(2) == input_bytes
    sizes = [
        (spec.fits(shape), spec.weight_bytes(shape, 2), spec.weight_bytes(shape, 4))
        for shape in SHAPES
    ]
    assert sizes == WEIGHT_BYTES[name]


ERRORS = {
    "QarlError": ("error", 1),
    "InputError": ("input", 2),
    "ConfigError": ("configuration", 2),
    "SchemeError": ("scheme", 2),
    "ModelError": ("model", 2),
    "GraphError": ("operators", 2),
    "NoEngineModelError": ("operators", 2),
    "PolicyError": ("policy", 2),
    "PrecisionError": ("precision", 1),
    "DiskError": ("disk", 1),
    "InstallError": ("installation", 2),
}
"""Error → heading of its message, and exit status of a command that it ends."""


def test_errors_end_commands_by_their_kind():
    kinds = {kind for kind in vars(errors).values() if isinstance(kind, type)}
    rows = {
        kind.__name__: (kind.heading, kind.exit_status)
        for kind in kinds
        if issubclass(kind, errors.QarlError)
    }
    assert rows == ERRORS


def test_a_long_value_is_quoted_in_eighty_characters():
    assert quoted("x" * 78) == f"'{'x' * 78}'"
    assert quoted("x" * 79) == f"'{'x' * 38}…{'x' * 39}'"
    assert len(quoted("x" * 79)) == 80


def test_a_long_path_is_quoted_with_the_name_of_its_file():
    assert quoted("/data" * 30 + "/stage2.json").endswith("/stage2.json'")


def test_warmup_of_all_steps_and_mini_batches_of_one_prompt_are_allowed():
    load_config(
        None,
        {
            "steps": "5",
            "learner.optimizer.warmup_steps": "5",
            "learner.mini_batches": "8",
            "rollout.prompts": "8",
        },
    )


def test_lists_are_cut_after_three_and_sizes_have_binary_units():
    assert [few("abcde"[:n]) for n in (3, 4, 5)] == [
        "a, b, c",
        "a, b, c and 1 more",
        "a, b, c and 2 more",
    ]
    assert [sized(n) for n in (2**30 - 2**20, 2**30, 3 * 2**29)] == [
        "1023.00 MiB",
        "1.00 GiB",
        "1.50 GiB",
    ]
    assert pattern_fault("first:1") is None
    assert "decoder layers with '0'" in f"{pattern_fault('last:0')}"
