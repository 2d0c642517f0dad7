"""Section `rollout` of a run's configuration: what is sampled, and on which engine or servers."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from qarl.configs.schema.base import PathText, Section, Text
from qarl.configs.schema.servers import Servers

MOST_PROMPTS = 10**6
"""Upper limit on prompts, sequences or problems at once, which only typing errors exceed."""
_MOST_RANKS = 64
"""Upper limit on the ranks of an engine, which only typing errors exceed."""
_BATCHED_TOKENS = 8192
"""Tokens that the engine computes at once: enough rows to keep matrix products busy."""
_MOST_PICTURES = 1024
"""Upper limit on the pictures of a prompt, which only typing errors exceed."""
LONGEST = 2**24
"""Upper limit on the tokens of a sequence, which only typing errors exceed."""


class RolloutConfig(Section):
    """Sampling of completions."""

    prompts: int = Field(
        default=32,
        ge=1,
        le=MOST_PROMPTS,
        description=(
            "Prompts per step. Raise it for a steadier gradient, at the price of more sampling."
        ),
    )
    samples: int = Field(
        default=8,
        ge=2,
        le=10_000,
        description=(
            "Completions per prompt, the group whose rewards are compared. Raise it if successes"
            " are rare."
        ),
    )
    max_prompt_tokens: int = Field(
        default=1024,
        ge=1,
        le=LONGEST,
        description=(
            "Upper limit on the tokens of a prompt. Longer questions of a file or data set are"
            " left out; one of a built-in task is an error."
        ),
    )
    pictures: int = Field(
        default=0,
        ge=0,
        le=_MOST_PICTURES,
        description=(
            "Upper limit on the pictures of a prompt, for models that take some"
            " (docs/guide/pictures.md). Default: prompts are text, and the model's part for"
            " pictures is not loaded."
        ),
    )
    max_new_tokens: int = Field(
        default=1024,
        ge=1,
        le=LONGEST,
        description="Upper limit on the tokens of a completion. Raise it if many are truncated.",
    )
    temperature: float = Field(
        default=1.0,
        gt=0,
        le=2,
        description=(
            "Sampling temperature of completions. The learner's log-probs are of the same"
            " distribution."
        ),
    )
    stop: Annotated[
        tuple[Text, ...], BeforeValidator(lambda v: [v] if isinstance(v, str) else v)
    ] = Field(
        default=(),
        description=(
            "Text that ends a completion and is left out of it, or a list of such texts. Set it"
            " for models that do not end by themselves."
        ),
    )
    loop_limit: int | None = Field(
        default=None,
        ge=2,
        description=(
            "End a completion that repeats up to 8 tokens this many times in a row. Default: loops"
            " go on."
        ),
    )
    max_num_seqs: int = Field(
        default=256,
        ge=1,
        le=MOST_PROMPTS,
        description="Sequences that the engine decodes at once. Lower it if memory is short.",
    )
    kv_cache_gib: int | None = Field(
        default=None,
        ge=1,
        description=(
            "Size of the engine's key/value cache in GiB, of each rank's where it has several."
            " Default: on GPUs the memory that `qarl plan` finds free, on CPUs that of one longest"
            " sequence."
        ),
    )
    prefix_caching: bool = Field(
        default=True,
        description=(
            "Reuse keys and values of shared prefixes within a weight version. Set false to rule"
            " the cache out as a cause. Models whose layers keep a state"
            " (Qwen3.5, Mamba) do without it."
        ),
    )
    dynamic_sampling: int | None = Field(
        default=None,
        ge=0,
        description=(
            "Rounds of sampling that replace groups whose rewards are all equal. Set it if many"
            " are. Default: all groups are kept."
        ),
    )
    router_replay: bool = Field(
        default=False,
        description=(
            "Learn with the experts that the engine chose, for mixtures of experts on GPUs. Set"
            " true if learner and engine route differently."
        ),
    )
    enforce_eager: bool | None = Field(
        default=None,
        description=(
            "Decode without CUDA graphs (docs/explain/cuda.md). Default: false on GPUs, true on"
            " CPUs."
        ),
    )
    servers: Servers | None = Field(
        default=None,
        description=(
            "Sample on vLLM servers, given by their URLs or by a number to start on this machine"
            " (docs/guide/servers.md). Default: sample inside the run."
        ),
    )
    tensor_parallel_size: int = Field(
        default=1,
        ge=1,
        le=_MOST_RANKS,
        description=(
            "Ranks of each server, which divide its layers among them; the learner sums their"
            " products as they do (docs/guide/servers.md). Set it if one GPU cannot hold the"
            " policy. Needs rollout.servers."
        ),
    )
    server_key_file: PathText | None = Field(
        default=None,
        description=(
            "File with the servers' API key. Default: the key in the environment variable"
            " QARL_SERVER_KEY."
        ),
    )
    server_folder: PathText | None = Field(
        default=None,
        description=(
            "Folder for weight versions, which servers read under the same path; each run writes"
            " to a subfolder of its own. Default: in the run folder."
        ),
    )
    server_transfer: Literal["files", "http"] = Field(
        default="files",
        description=(
            "How weight versions reach the servers: as files on a file system that they share with"
            " the run. Set http if they share none; each server is then sent them."
        ),
    )
    server_seconds: float = Field(
        default=600.0,
        gt=0,
        description=(
            "Timeout in seconds for one server request, and for server start-up. Raise it for slow"
            " servers."
        ),
    )
    server_full_every: int = Field(
        default=50,
        ge=1,
        description=(
            "One in this many weight versions is sent in full; the others are differences from the"
            " one before, which run and servers then hold in host memory. Set 1 to send all in full"
            " and hold none."
        ),
    )
    max_staleness: int = Field(
        default=0,
        ge=0,
        le=16,
        description=(
            "Batches that servers sample while the learner works on one. With 1 they use the"
            " previous weights; from 2 on, new weights reach them while they sample"
            " (docs/guide/servers.md)."
        ),
    )

    @model_validator(mode="after")
    def _served(self) -> "RolloutConfig":
        if self.servers is None:
            for name in (
                "server_key_file",
                "server_folder",
                "server_transfer",
                "server_full_every",
                "server_seconds",
                "max_staleness",
            ):
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(
                        f"rollout.{name} {getattr(self, name)} is for sampling on servers: give"
                        " rollout.servers, their URLs or a number to start, or omit it"
                    )
        elif self.router_replay:
            raise ValueError(
                "rollout.router_replay true needs an engine in process; leave rollout.servers out"
            )
        elif self.pictures:
            raise ValueError(
                f"rollout.pictures {self.pictures} needs an engine in process, from which the"
                " learner takes what it made of the pictures; leave rollout.servers out"
            )
        return self

    @property
    def longest(self) -> int:
        """Most tokens that a prompt and its completion may have together."""
        return self.max_prompt_tokens + self.max_new_tokens

    def batched_tokens(self, device: str) -> int:
        """Return the most tokens that the engine computes at once, for which it sizes its buffers.

        vLLM's own default depends on the GPU's name and memory. The engine is told this number
        instead, so that the plan counts what is allocated. On CPUs prompts are not cut, so the
        longest one has to fit.

        device: "cpu" or "cuda".
        """
        whole = self.longest if device == "cpu" else 0
        return max(_BATCHED_TOKENS, self.max_num_seqs, whole)
