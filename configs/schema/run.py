"""The typed configuration tree. Imports neither torch nor vllm; unknown keys are errors.

Core fields come first in each section, advanced ones after. Every field is set by YAML or by a dotted
override (`--learner.optimizer.lr 3e-4`).
"""

import difflib
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, Field, ValidationError, model_validator

from configs.schema.base import Choice, ConfigError, Dtype, Section, alternatives, pattern_fault
from configs.schema.learner import LearnerConfig


class TaskConfig(Section):
    """Where prompts and rewards come from."""

    name: str = Field(default="chain_sum", description="a reasoning-gym dataset, or a path ending in .jsonl")
    options: dict[str, Any] = Field(default_factory=dict, description="fields of the dataset's own config")
    reward: str | None = Field(default=None, description="package.module:function(problem, text) -> float")


class RolloutConfig(Section):
    """Sampling."""

    prompts: int = Field(default=32, ge=1, description="prompts a step")
    samples: int = Field(default=8, ge=2, description="completions a prompt (the group whose rewards are compared)")
    max_prompt_tokens: int = Field(default=1024, ge=1, description="a longer prompt is an error")
    max_new_tokens: int = Field(default=1024, ge=1, description="tokens a completion may have")
    max_num_seqs: int = Field(default=256, ge=1, description="sequences the engine decodes at once")
    kv_cache_gib: int = Field(default=1, ge=1, description="key/value cache on CPUs, GiB")
    memory_share: float = Field(default=0.2, gt=0, lt=1, description="share of the device's memory vLLM plans with")
    prefix_caching: bool = Field(
        default=True, description="reuse key/values of shared prefixes within a weight version"
    )
    dynamic_sampling: int | None = Field(
        default=None,
        ge=0,
        description="drop groups whose rewards are all equal, and sample up to this many more rounds to replace them; "
        "None keeps all",
    )
    router_replay: bool = Field(
        default=False, description="mixtures of experts: the learner reuses the experts the engine chose (GPU)"
    )
    enforce_eager: bool = Field(default=True, description="no CUDA graphs (they would hold tensors a publish replaces)")
    logging_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(default="ERROR", description="of vLLM")


class SyncConfig(Section):
    """Publishing and its proofs."""

    canary_every: int = Field(default=50, ge=1, description="publishes between canaries (the first publish has one)")
    canary_bound: float | None = Field(
        default=None, gt=0, description="mean |Δ log p| that stops a run; None: the scheme's"
    )
    gate_bound: float | None = Field(default=None, gt=0, description="step-0 bound on mean |log w|; None: the scheme's")
    gate_k3_bound: float | None = Field(default=None, gt=0, description="step-0 bound on the k3 KL; None: the scheme's")


class EvalConfig(Section):
    """Held-out greedy accuracy."""

    problems: int = Field(default=256, ge=0, description="held-out problems; 0 switches evaluation off")
    every: int = Field(default=50, ge=1, description="steps between evaluations (the first and last step have one)")


class CheckpointConfig(Section):
    """Checkpoints to resume from."""

    every: int = Field(default=50, ge=1, description="steps between checkpoints (the last step has one)")
    keep: int = Field(default=2, ge=1, description="newest checkpoints kept")


class LayerRule(Section):
    """Some layers in a scheme of their own. Written `PATTERN=SCHEME`, or as a mapping of the two fields."""

    match: str = Field(description="exact layer name, shell pattern, re:EXPRESSION, first:K or last:K decoder layers")
    scheme: str = Field(description="their scheme; bf16 leaves them in the compute dtype")

    def __str__(self) -> str:
        return f"{self.match}={self.scheme}"

    @property
    def decoder_layers(self) -> bool:
        """Whether the rule counts decoder layers (`first:K`, `last:K`) instead of matching names."""
        return self.match.startswith(("first:", "last:"))

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        match, equals, scheme = value.strip().rpartition("=")
        if not equals:
            raise ValueError(f"{value!r} is no layer rule; write PATTERN=SCHEME")
        return {"match": match, "scheme": scheme}

    @model_validator(mode="after")
    def _readable(self) -> "LayerRule":
        if not self.match or not self.scheme:
            raise ValueError(f"layer rule '{self}' needs a pattern and a scheme: PATTERN=SCHEME")
        fault = pattern_fault(self.match)
        if fault:
            raise ValueError(f"layer rule '{self}' {fault}")
        return self


def _rules_from_text(value: Any) -> Any:
    """`PATTERN=SCHEME,PATTERN=SCHEME` → its parts. A comma ends a rule only after a scheme's name, since patterns may
    hold commas themselves."""
    return re.sub(r"(=[\w.-]+)\s*,\s*", r"\1\n", value).splitlines() if isinstance(value, str) else value


class RunConfig(Section):
    """A whole run."""

    model: str = Field(
        default="tiny-qwen3", description="an embedded policy's name, a transformers folder, or a hub id"
    )
    scheme: str = Field(default="w4a16", description="low-bit scheme; `qarl schemes` lists them")
    layers: Annotated[tuple[LayerRule, ...], BeforeValidator(_rules_from_text)] = Field(
        default=(), description="layers in other schemes, first match wins: PATTERN=SCHEME,… (docs/layers.md)"
    )
    dtype: Dtype = Field(default="bfloat16", description="compute dtype of activations, in learner and engine")
    steps: int = Field(default=200, ge=1, description="training steps")
    seed: int = Field(default=0, ge=0, description="of problems, sampling and mini-batches")
    output: str | None = Field(default=None, description="run folder; None: runs/<model>-<scheme>-<time>")
    task: TaskConfig = Field(default_factory=lambda: TaskConfig())
    rollout: RolloutConfig = Field(default_factory=lambda: RolloutConfig())
    learner: LearnerConfig = Field(default_factory=lambda: LearnerConfig())
    sync: SyncConfig = Field(default_factory=lambda: SyncConfig())
    eval: EvalConfig = Field(default_factory=lambda: EvalConfig())
    checkpoint: CheckpointConfig = Field(default_factory=lambda: CheckpointConfig())
    export: bool = Field(default=True, description="export and verify the deployable checkpoint at the end")

    @model_validator(mode="after")
    def _consistent(self) -> "RunConfig":
        if self.learner.mini_batches > self.rollout.prompts:
            raise ValueError(
                f"learner.mini_batches {self.learner.mini_batches} is more than rollout.prompts "
                f"{self.rollout.prompts}; each mini-batch needs at least one prompt's group"
            )
        if self.rollout.router_replay and self.rollout.prefix_caching:
            raise ValueError(
                "rollout.router_replay true needs rollout.prefix_caching false: tokens found in the cache are not "
                "routed again, so the engine cannot tell their experts"
            )
        longest = self.rollout.max_prompt_tokens + self.rollout.max_new_tokens
        if self.learner.micro_batch_tokens < longest:
            raise ValueError(
                f"learner.micro_batch_tokens {self.learner.micro_batch_tokens} is less than one longest sequence, "
                f"rollout.max_prompt_tokens + rollout.max_new_tokens = {longest}; raise the first or lower the others"
            )
        return self


def field_paths(section: type[Section] = RunConfig, prefix: str = "") -> dict[str, Any]:
    """Every leaf field by dotted path → its pydantic `FieldInfo`; of a choice, the first alternative's that has it."""
    paths: dict[str, Any] = {}
    for name, info in section.model_fields.items():
        inner = alternatives(info.annotation)
        if not inner:
            paths[prefix + name] = info
        for part in inner:
            for path, leaf in field_paths(part, f"{prefix}{name}.").items():
                paths.setdefault(path, leaf)
    return paths


def choice_sections(section: type[Section] = RunConfig, prefix: str = "") -> dict[str, tuple[type[Choice], ...]]:
    """Sections with a deciding `name`, by dotted path → their alternatives."""
    found: dict[str, tuple[type[Choice], ...]] = {}
    for name, info in section.model_fields.items():
        parts = alternatives(info.annotation)
        if parts and all(issubclass(part, Choice) for part in parts):
            found[prefix + name] = parts  # pyright: ignore[reportArgumentType]
        for part in parts:
            found |= choice_sections(part, f"{prefix}{name}.")
    return found


def load_config(file: Path | None, overrides: dict[str, str]) -> RunConfig:
    """The resolved configuration: defaults, then the YAML file, then dotted overrides (YAML-typed values).

    An override that names another objective (correction, aggregation, KL penalty) than the file starts from that one's
    defaults: the file's options were for the other. Raises `ConfigError` for an unreadable file, an unknown key (with
    the nearest), or a value out of range.
    """
    tree = _read_yaml(file) if file else {}
    _refuse_unknown(tree, str(file))
    chosen = {path: _parse(path, text) for path, text in overrides.items()}
    for section in choice_sections():
        _forget_unchosen(tree, section, chosen.get(f"{section}.name"))
    for path, value in chosen.items():
        _set(tree, path, value)
    return config_from_tree(tree)


def config_from_tree(tree: dict[str, Any]) -> RunConfig:
    """A configuration from nested dictionaries; raises `ConfigError` naming each wrong field."""
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        lines = []
        for problem in error.errors():
            path = _field_of(problem["loc"])
            given = "" if problem["type"] == "missing" or not path else f" (given: {problem['input']!r})"
            lines.append(f"{path}{': ' if path else ''}{problem['msg'].removeprefix('Value error, ')}{given}")
        raise ConfigError("; ".join(lines)) from error


def _field_of(location: tuple[str | int, ...]) -> str:
    """The dotted path of a pydantic error's location, which also holds the name chosen for a section."""
    parts: list[str] = []
    for part in map(str, location):
        alternatives_here = choice_sections().get(".".join(parts), ())
        if not any(part in section.names() for section in alternatives_here):
            parts.append(part)
    return ".".join(parts)


def _read_yaml(file: Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(file.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read configuration {str(file)!r}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"configuration {str(file)!r} is not YAML: {error}") from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"configuration {str(file)!r} must hold keys and values, not a {type(tree).__name__}")
    return tree


def _forget_unchosen(tree: dict[str, Any], section: str, name: Any) -> None:
    *parents, leaf = section.split(".")
    for key in parents:
        tree = tree.get(key) or {}
    if name is not None and tree.get(leaf) and tree[leaf].get("name") != name:
        tree[leaf] = {}


def _refuse_unknown(tree: dict[str, Any], source: str) -> None:
    known = field_paths()
    for path in _leaf_paths(tree, known):
        if path not in known:
            raise ConfigError(f"unknown key {path!r} in {source}{_nearest(path, known)}")


def _leaf_paths(tree: dict[str, Any], known: dict[str, Any], prefix: str = "") -> list[str]:
    paths: list[str] = []
    for key, value in tree.items():
        path = f"{prefix}{key}"
        is_section = any(name.startswith(path + ".") for name in known)
        paths += _leaf_paths(value, known, path + ".") if is_section and isinstance(value, dict) else [path]
    return paths


def _nearest(path: str, known: dict[str, Any]) -> str:
    near = difflib.get_close_matches(path, known, n=1) or [k for k in known if k.endswith("." + path.split(".")[-1])]
    return f"; did you mean {near[0]!r}?" if near else "; `qarl train --help` lists the keys"


def _set(tree: dict[str, Any], path: str, value: Any) -> None:
    known = field_paths()
    parent = path.rpartition(".")[0]
    free_form = parent in known and known[parent].annotation == dict[str, Any]
    if path not in known and not free_form:
        raise ConfigError(f"unknown option --{path}{_nearest(path, known)}")
    *parents, leaf = path.split(".")
    for key in parents:
        tree = tree.setdefault(key, {})
    tree[leaf] = value


def _parse(path: str, text: str) -> Any:
    """A YAML scalar or flow collection, with 1e-6 read as a number (YAML 1.1 wants a dot).

    Patterns over layer names in their short form are no YAML (`*` begins an alias there) and pass as text.
    """
    if path in ("layers", "learner.lora.targets") and not text.lstrip().startswith("["):
        return text
    try:
        return float(text) if "e" in text.lower() else yaml.safe_load(text)
    except ValueError:
        pass
    except yaml.YAMLError as error:
        raise _unreadable(path, text, error) from error
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise _unreadable(path, text, error) from error


def _unreadable(path: str, text: str, error: yaml.YAMLError) -> ConfigError:
    return ConfigError(f"option --{path} {text!r} is not a YAML value: {error}; quote it twice to give it as text")
