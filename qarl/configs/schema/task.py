"""Where prompts and rewards come from: `task.*` of the configuration."""

from typing import Any, Literal

from pydantic import Field, model_validator

from qarl.configs.schema.base import PathText, Section, Text

VERIFIERS = "verifiers:"


class TaskConfig(Section):
    """Where prompts and rewards come from."""

    name: PathText = Field(
        default="chain_sum",
        description=(
            "built-in task (`qarl tasks` lists them), math, verifiers:ID, or your questions: a"
            " .jsonl, .csv, .tsv or .parquet file, or hf:ID or hf:FOLDER for a Hugging Face"
            " data set"
        ),
    )
    options: dict[str, Any] = Field(
        default_factory=dict,
        description=(
            "a built-in task's own options, to make it easier or harder (`qarl tasks NAME`); of"
            " verifiers:ID its [env] section"
        ),
    )
    prompt: Text | None = Field(
        default=None,
        description=(
            "column of a file or data set with the question, or chat messages; without it question,"
            " else prompt"
        ),
    )
    answer: Text | None = Field(
        default=None,
        description=(
            "column with the reference answer, a dot leading into nested ones; without it answer"
        ),
    )
    data: PathText | None = Field(
        default=None,
        description=(
            "of task math: a file, or hf:ID or hf:FOLDER, with columns problem and answer; without"
            " it the paper's, hf:Elliott/Openr1-Math-46k-8192"
        ),
    )
    subset: Text | None = Field(
        default=None,
        description="configuration of a Hugging Face data set that has several",
    )
    split: Text | None = Field(
        default=None,
        description="of a Hugging Face data set, to train on; without it train",
    )
    heldout: Text | None = Field(
        default=None,
        description="the split to evaluate on; without it a part of `split`",
    )
    system: Text | None = Field(default=None, description="system prompt before every question")
    template: dict[str, Any] = Field(
        default_factory=dict,
        description="arguments of the chat template, such as {enable_thinking: false}",
    )
    reward: PathText | None = Field(
        default=None,
        description=(
            "exact, math, or your function as mine.py:name or package.module:name"
            " (docs/guide/tasks.md); several with weights: mine.py:a=1,mine.py:b=0.2. Without it"
            " the task's own"
        ),
    )
    correct: PathText | None = Field(
        default=None,
        description=(
            "what accuracy counts: exact, math, or your function, true for a right answer; without"
            " it the task's own"
        ),
    )
    rollout: PathText | None = Field(
        default=None,
        description=(
            "your async function that speaks with the policy over several turns, as mine.py:name "
            "(docs/guide/conversations.md); without it one answer a prompt"
        ),
    )
    environment: PathText | None = Field(
        default=None,
        description=(
            "your class whose public methods are tools that the policy may call, as mine.py:Name "
            "(docs/guide/conversations.md)"
        ),
    )
    tool_parser: Text = Field(
        default="hermes",
        description="how the model writes calls: one of vLLM's parsers",
    )
    time_limit: float = Field(
        default=60.0,
        gt=0,
        le=10**6,
        description=(
            "seconds for a call of your reward or environment, and for your rollout between turns"
        ),
    )
    memory_limit: float | None = Field(
        default=None, gt=0, description="GiB a reward may allocate; without it no limit"
    )
    on_error: Literal["stop", "retry", "none"] = Field(
        default="stop",
        description=(
            "where your reward fails: stop the run; ask twice more before that; or leave the"
            " completion out"
        ),
    )

    @model_validator(mode="after")
    def _one_way_to_speak(self) -> "TaskConfig":
        if self.rollout and self.environment:
            raise ValueError(
                f"task.rollout {self.rollout!r} and task.environment {self.environment!r} both"
                " speak with the policy; leave one of them out"
            )
        if not self.speaks and self.tool_parser != type(self).model_fields["tool_parser"].default:
            raise ValueError(
                f"task.tool_parser {self.tool_parser!r} is for calls of tools: give"
                " task.environment or task.rollout, or leave it out"
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
        """Whether something of the task's speaks with the policy over several turns."""
        return bool(self.environment or self.rollout) or self.name.startswith(VERIFIERS)
