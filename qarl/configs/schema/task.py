"""Section `task`: source of prompts and rewards."""

from typing import Any, Literal

from pydantic import Field, model_validator

from qarl.configs.schema.base import PathText, Section, Text

VERIFIERS = "verifiers:"
"""Prefix of a task's name that is an environment of the verifiers package."""


class TaskConfig(Section):
    """Source of prompts and rewards."""

    name: PathText = Field(
        default="chain_sum",
        description=(
            "Built-in task (see `qarl tasks`), math, verifiers:ID, hf:ID or hf:FOLDER (Hugging"
            " Face), or a .jsonl, .csv, .tsv or .parquet file of yours."
        ),
    )
    options: dict[str, Any] = Field(
        default_factory=dict,
        description=(
            "Options of a built-in task, to make it easier or harder (`qarl tasks NAME`). For"
            " verifiers:ID, its [env] section."
        ),
    )
    prompt: Text | None = Field(
        default=None,
        description=(
            "Column of a file or data set that holds the question or chat messages. Default:"
            " question, else prompt."
        ),
    )
    answer: Text | None = Field(
        default=None,
        description=(
            "Column that holds the reference answer; dots lead into nested columns. Default:"
            " answer."
        ),
    )
    data: PathText | None = Field(
        default=None,
        description=(
            "Problems of task math: a file, hf:ID or hf:FOLDER with columns problem and answer."
            " Default: the paper's, hf:Elliott/Openr1-Math-46k-8192."
        ),
    )
    subset: Text | None = Field(
        default=None,
        description="Configuration of a Hugging Face data set. Set it if the data set has several.",
    )
    split: Text | None = Field(
        default=None,
        description="Split of a Hugging Face data set to train on. Default: train.",
    )
    heldout: Text | None = Field(
        default=None,
        description=(
            "Split of a Hugging Face data set to evaluate on. Default: one question in eight of"
            " `split`."
        ),
    )
    system: Text | None = Field(default=None, description="System prompt before every question.")
    template: dict[str, Any] = Field(
        default_factory=dict,
        description="Arguments of the chat template, such as {enable_thinking: false}.",
    )
    reward: PathText | None = Field(
        default=None,
        description=(
            "Reward: your mine.py:name or package.module:name, exact, math, or a sum as"
            " mine.py:a=1,mine.py:b=2. Default: the task's."
        ),
    )
    correct: PathText | None = Field(
        default=None,
        description=(
            "Check that accuracy counts by: exact, math, or your function, which returns true for a"
            " right answer (docs/guide/tasks.md). Default: the task's own."
        ),
    )
    rollout: PathText | None = Field(
        default=None,
        description=(
            "Your async function that talks with the policy over several turns, as mine.py:name"
            " (docs/guide/conversations.md). Default: one answer per prompt."
        ),
    )
    environment: PathText | None = Field(
        default=None,
        description=(
            "Your class whose public methods are tools that the policy may call, as mine.py:Name"
            " (docs/guide/conversations.md)."
        ),
    )
    tool_parser: Text = Field(
        default="hermes",
        description=(
            "Name of the vLLM parser that reads the model's tool calls. Set the one that fits the"
            " model's format."
        ),
    )
    time_limit: float = Field(
        default=60.0,
        gt=0,
        le=10**6,
        description=(
            "Timeout in seconds for one call of your reward or environment, and for your rollout"
            " between turns."
        ),
    )
    memory_limit: float | None = Field(
        default=None,
        gt=0,
        description="Memory in GiB that your reward may allocate. Default: no limit.",
    )
    on_error: Literal["stop", "retry", "none"] = Field(
        default="stop",
        description=(
            "Reaction when your reward fails: stop the run, retry twice before that, or none to"
            " leave the completion out."
        ),
    )

    @model_validator(mode="after")
    def _one_way_to_speak(self) -> "TaskConfig":
        if self.rollout and self.environment:
            raise ValueError(
                f"task.rollout {self.rollout!r} and task.environment {self.environment!r} both"
                " speak with the policy; omit one of them"
            )
        if not self.speaks and self.tool_parser != type(self).model_fields["tool_parser"].default:
            raise ValueError(
                f"task.tool_parser {self.tool_parser!r} is for calls of tools: give"
                " task.environment or task.rollout, or omit it"
            )
        if self.on_error != "stop" and self.reward is None:
            raise ValueError(
                f"task.on_error {self.on_error!r} is for your own reward; give task.reward"
            )
        if self.memory_limit and ":" not in f"{self.reward}{self.correct}":
            raise ValueError(
                f"task.memory_limit {self.memory_limit:g} is for your own reward; give task.reward"
            )
        return self

    @property
    def speaks(self) -> bool:
        """Return whether the task talks with the policy over several turns."""
        return bool(self.environment or self.rollout) or self.name.startswith(VERIFIERS)
