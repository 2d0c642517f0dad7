"""Tasks that reasoning-gym generates on the fly (https://github.com/open-thought/reasoning-gym)."""

import dataclasses
import difflib
import json
import sys
import warnings
from functools import lru_cache
from typing import Any

from qarl.configs.seeds import stable_hash
from qarl.configs.words import did_you_mean
from qarl.tasks.base import (
    Failure,
    Picture,
    Problem,
    Scorer,
    Split,
    TaskError,
    check_request,
    is_heldout,
)
from qarl.tasks.drawn_shapes import DrawnShapesConfig, DrawnShapesDataset
from qarl.tasks.follow_rule import FollowRuleConfig, FollowRuleDataset
from qarl.tasks.math import TIME_LIMIT
from qarl.tasks.rewards import each
from qarl.tasks.worked import (
    LookupSumConfig,
    LookupSumDataset,
    RunningTotalConfig,
    RunningTotalDataset,
)
from qarl.tasks.worker import Job
from qarl.tasks.workers import Workers

DEFAULT_OPTIONS: dict[str, dict[str, Any]] = {
    "chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2},
}
"""Options of a task if the user gives none.

For `chain_sum`, two-term sums and differences of 1- to 2-digit numbers.
"""

_KINDS = {
    "int": ((int,), "a whole number"),
    "float": ((int, float), "a number"),
    "bool": ((bool,), "true or false"),
}
OWN_OPTIONS = ("seed", "size")
"""Dataset fields that QaRL sets, so that problems are a pure function of (split, seed, k)."""

BLOCK = 256
"""Number of problems that share one dataset object.

It is small because some datasets precompute `size` entries.
"""

MAX_DRAWS = 256
"""Number of candidates drawn for one problem before its split counts as empty.

The probability that this happens by chance is (7/8)^256 ≈ 1e-15.
"""

# These compare texts and evaluate none, so they need no child process.
IN_PROCESS = ("chain_sum", "running_total", "lookup_sum", "follow_rule", "drawn_shapes")


class ReasoningGymTask:
    """A reasoning-gym dataset as an endless task with disjoint training and held-out questions.

    `score` is reasoning-gym's own score. Many datasets, chain_sum included, give partial credit to
    a wrong answer that contains the right one: len(right) / len(given), so "77" earns 0.5 if "7" is
    right. `correct` counts full scores only; `reward="qarl.tasks:exact_reward"` trains without
    partial credit.
    """

    def __init__(self, name: str, options: dict[str, Any] | None = None) -> None:
        """Validate the dataset's name and options. Default: `DEFAULT_OPTIONS`, if it has any.

        Raises:
            TaskError: The name or an option is unknown, or the dataset refuses a value.
        """
        self.name = name
        self._dataset_class, self._config_class = dataset_of(name)
        self.options = dict(options or DEFAULT_OPTIONS.get(name, {}))
        _check_option_names(name, self.options, self._config_class)
        self._dataset = lru_cache(maxsize=64)(self._create_dataset)
        self._scorer = self._dataset(0)

    def problems(
        self,
        split: Split,
        start: int,
        count: int,
        seed: int,
    ) -> list[Problem]:
        """Return problems start, …, start + count - 1 of the split for this seed.

        `is_heldout` decides the split of a question.

        Raises:
            TaskError: The request is invalid, or `MAX_DRAWS` candidates had none of this split,
                which happens in tiny tasks.
        """
        check_request(split, start, count)
        return [self._problem(split, seed, index) for index in range(start, start + count)]

    def score(self, problem: Problem, text: str) -> float:
        """Return reasoning-gym's score of the stripped text, in [0, 1].

        The class describes partial credit.
        """
        entry = {
            "question": problem.question,
            "answer": problem.answer,
            "metadata": problem.metadata,
        }
        return self._scorer.score_answer(text.strip(), entry)

    def scorer(self) -> Scorer:
        """Return `score` as a `Scorer`, 0.0 if it raises or takes too long.

        It runs in a child process with the time limit of `math`, because many datasets let sympy
        evaluate the text.
        """
        if self.name in IN_PROCESS:
            return each(self.score)
        job = Job(
            word="reward",
            spec="qarl.tasks.procedural:score_of",
            task=self.name,
            time_limit=TIME_LIMIT,
            path=tuple(sys.path),
            options={"name": self.name, "options": json.dumps(self.options)},
        )
        judge = Workers(job, goes_on=True)
        return lambda responses: [
            0.0 if isinstance(score, Failure) else score for score in judge(responses)
        ]

    def _problem(self, split: Split, seed: int, index: int) -> Problem:
        block, row = divmod(index, BLOCK)
        for draw in range(MAX_DRAWS):
            # 31 bits: datasets seed generators, some of them 32-bit, with seed + row.
            dataset = self._dataset(stable_hash(self.name, split, seed, block, draw) % 2**31)
            try:
                entry = dataset[row]
            except Exception as error:  # the dataset's own checks accepted the options
                raise TaskError(
                    f"task {self.name!r} fails with the options {self.options}: {error};"
                    f" `qarl tasks {self.name}` lists its options"
                ) from error
            pictures = tuple(Picture.of(file) for file in entry.get("pictures", ()))
            if is_heldout(entry["question"], pictures) == (split == "heldout"):
                problem_id = f"{self.name}/{split}/{seed}/{index}"
                return Problem(
                    problem_id,
                    entry["question"],
                    str(entry["answer"]),
                    entry["metadata"],
                    pictures=pictures,
                )
        raise TaskError(
            f"task {self.name!r} with options {self.options} gave no {split} question in"
            f" {MAX_DRAWS} draws; its space is too small to set questions aside: choose options"
            " with more distinct questions"
        )

    def _create_dataset(self, seed: int) -> Any:
        try:
            return self._dataset_class(
                config=self._config_class(**self.options, seed=seed, size=BLOCK)
            )
        except Exception as error:  # reasoning-gym validates with assertions
            raise TaskError(
                f"task {self.name!r} refuses the options {self.options}: {error};"
                f" `qarl tasks {self.name}` lists them"
            ) from error


@lru_cache
def _task(name: str, options: str) -> ReasoningGymTask:
    return ReasoningGymTask(name, json.loads(options))


def score_of(
    problem: Problem,
    text: str,
    name: str = "",
    options: str = "{}",
) -> float:
    """Return `ReasoningGymTask.score` in a child process.

    options: options of the dataset as JSON.
    """
    return _task(name, options).score(problem, text)


OWN_DATASETS: dict[str, tuple[type, type]] = {
    "drawn_shapes": (DrawnShapesDataset, DrawnShapesConfig),
    "follow_rule": (FollowRuleDataset, FollowRuleConfig),
    "lookup_sum": (LookupSumDataset, LookupSumConfig),
    "running_total": (RunningTotalDataset, RunningTotalConfig),
}
"""QaRL's own datasets: name → (dataset class, config class)."""


def reasoning_gym_datasets() -> dict[str, tuple[type, type]]:
    """Return every dataset of reasoning-gym and of QaRL: name → (dataset class, config class).

    Importing reasoning-gym takes seconds.
    """
    with warnings.catch_warnings():
        # Its dependency cellpylib compares strings with `is`; compiling that warns once per
        # installation.
        warnings.filterwarnings("ignore", category=SyntaxWarning, message='.*"is" with')
        from reasoning_gym.factory import DATASETS
    return {**DATASETS, **OWN_DATASETS}


def dataset_of(name: str) -> tuple[Any, Any]:
    """Return a dataset's class and its config's class.

    reasoning-gym is imported only if the name is not one of QaRL's own. Raises `TaskError` for an
    unknown name, with the nearest names.
    """
    if name in OWN_DATASETS:
        return OWN_DATASETS[name]
    datasets = reasoning_gym_datasets()
    if name in datasets:
        return datasets[name]
    near = difflib.get_close_matches(name, datasets, n=3, cutoff=0.5)
    hint = f"; did you mean {', '.join(near)}?" if near else ""
    if "/" in name or "." in name:
        lines = ""
        if name.endswith(".json"):
            lines = f"; a list becomes lines by: jq -c '.[]' {name} > {name}l"
        raise TaskError(
            f"task {name!r} is not a built-in one; a file of questions is a .jsonl, .csv, .tsv or"
            f" .parquet, and a Hugging Face data set, or a folder with one, reads hf:{name}{lines}"
        )
    raise TaskError(
        f"unknown task {name!r}; it must be one of {len(datasets)} built-in ones, which `qarl"
        f" tasks` lists, a path ending in .jsonl, .csv, .tsv or .parquet, or hf:DATASET{hint}"
    )


def _check_option_names(name: str, options: dict[str, Any], config_class: Any) -> None:
    own = [option for option in options if option in OWN_OPTIONS]
    if own:
        raise TaskError(
            f"task.options.{own[0]} has no effect: the run's --seed decides, and questions are"
            " drawn without end; omit it"
        )
    allowed = [
        field.name for field in dataclasses.fields(config_class) if field.name not in OWN_OPTIONS
    ]
    for option in options:
        if option not in allowed:
            near = did_you_mean(option, allowed)
            raise TaskError(
                f"unknown option {option!r} of task {name!r}; allowed: {', '.join(allowed)}{near}"
            )
    for field in dataclasses.fields(config_class):
        kind = getattr(field.type, "__name__", field.type)
        if field.name not in options or kind not in _KINDS:
            continue
        value = options[field.name]
        types, description = _KINDS[kind]
        if type(value) not in types:
            raise TaskError(
                f"option {field.name!r} of task {name!r} is {value!r}; it must be {description}"
            )
