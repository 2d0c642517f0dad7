"""Problems made into prompts by one tokenizer, and completions into groups with rewards."""

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from qarl.configs.errors import ConfigError, ModelError
from qarl.configs.schema.rollout import RolloutConfig
from qarl.configs.schema.task import TaskConfig
from qarl.configs.words import did_you_mean, quoted
from qarl.conversations import Rollout, Speaker, converse
from qarl.conversations.chat import ChatServer
from qarl.conversations.environment import environment_rollout
from qarl.conversations.tools import ToolTurns
from qarl.rollout.coroutines import completed
from qarl.rollout.engine import SamplingEngine
from qarl.rollout.types import Completion, Group, Prompt, Sampling
from qarl.rollout.vocabulary import Vocabulary
from qarl.run.picture_prompts import PicturePrompts
from qarl.tasks import Problem, Response, Task
from qarl.tasks.environments import Environments, open_environments

Sampled = tuple[list[Prompt], list[list[Completion]]]
"""Prompts, and the completions of each."""


class Prompter:
    """Turns problems into prompts with the model's own chat template, if it has one.

    template: arguments of the chat template. environments: the template describes their tools, and
    their `reset` adds to a question. tool_parser: name of the parser of tool calls. pictures: upper
    bound on the pictures of a prompt. Raises `ConfigError` for an argument that the template does
    not mention, `ModelError` for pictures that the model does not take, and what `ToolTurns`
    raises.
    """

    def __init__(
        self,
        model_folder: Path,
        max_prompt_tokens: int,
        template: Mapping[str, Any] | None = None,
        environments: Environments | None = None,
        tool_parser: str = "",
        pictures: int = 0,
    ):
        self.tokenizer: Any = AutoTokenizer.from_pretrained(model_folder)
        self._folder = str(model_folder)
        self.vocabulary = Vocabulary.of(model_folder)
        """The token ids that the model can look up."""
        self._limit = max_prompt_tokens
        tools = {"tools": list(environments.description.tools)} if environments else {}
        self._template = dict(template or {}) | tools
        self._refuse_ignored()
        self._environments = environments
        self._tool_parser = tool_parser
        self._pictures = PicturePrompts(model_folder, self.tokenizer, pictures)
        self.speaker()  # raises now what would otherwise be raised at the first request

    @property
    def pad_token(self) -> int:
        """Token id for padding; its value never reaches a loss."""
        token = self.tokenizer.pad_token_id
        # A padding token may have been added without a row of its own.
        return token if token is not None and self.vocabulary.has(token) else 0

    def prompt(self, problem: Problem) -> Prompt:
        """Return a problem's prompt.

        Raises `ConfigError` for a prompt longer than the limit, `ModelError` for one without a
        token or with one that the model cannot look up, and `RewardError` if an environment's
        `reset` fails.
        """
        problem = self._opened(problem)
        ids = self._token_ids([problem])[0]
        if len(ids) > self._limit:
            raise ConfigError(
                f"the prompt of problem {problem.id!r} has {len(ids)} tokens, above"
                f" rollout.max_prompt_tokens {self._limit}; raise the limit or change the task"
                f" ({quoted(problem.question)})"
            )
        if not ids:
            raise ModelError(
                f"the tokenizer of {self._folder!r} makes no token of {problem.question!r}; its"
                " files look incomplete, so download or copy the model again"
            )
        self._require_rows(problem, ids)
        pictures = self._pictures.of(problem, self._unexpanded([problem])[0])
        return Prompt(problem.id, problem.question, tuple(ids), pictures=pictures)

    def text(self, problem: Problem) -> str:
        """Return the prompt as text, including the template's special tokens.

        Raises `ConfigError` for a chat if the tokenizer has no template, `ModelError` for a
        template that fails.
        """
        if not self._plain:
            try:
                arguments = {
                    "tokenize": False,
                    "add_generation_prompt": True,
                    **self._template,
                }
                return self.tokenizer.apply_chat_template(self._pictures.chat(problem), **arguments)
            except Exception as error:  # a template may raise anything
                roles = ", ".join(message["role"] for message in problem.chat)
                raise ModelError(
                    f"the chat template of {self._folder!r} cannot be applied:"
                    f" {type(error).__name__}: {error} (problem {problem.id!r}, messages of"
                    f" {roles}); correct chat_template in its tokenizer_config.json or"
                    " chat_template.jinja, or give it messages that it takes"
                ) from error
        if problem.messages:
            raise ConfigError(
                f"problem {problem.id!r} is a chat of {len(problem.messages)} messages, but the"
                " tokenizer has no chat template; give plain questions, or a model with one"
            )
        return problem.question

    def speaker(
        self, rollout: Rollout | None = None, time_limit: float | None = None
    ) -> Speaker | None:
        """Return the speaker of a task's rollout or environments' tools; None for plain answers.

        Make one for each request, in the thread that makes prompts: it gets its own copy of the
        tokenizer, which is not thread-safe, because requests may wait in other threads.
        """
        if self._environments is None and rollout is None:
            return None
        tokenizer = copy.deepcopy(self.tokenizer)
        if self._environments:  # no time limit for the whole: each tool call has one
            turns = ToolTurns(tokenizer, self._tool_parser, self._template)
            return Speaker(environment_rollout(self._environments, turns), tokenizer, None)
        assert rollout is not None
        server = ChatServer(tokenizer, self._tool_parser, self._template, self._limit)
        return Speaker(rollout, tokenizer, time_limit, server)

    def fits(self, problems: Sequence[Problem]) -> list[bool]:
        """Return for each problem whether its prompt is within the limit."""
        return [length <= self._limit for length in self.lengths(problems)]

    def lengths(self, problems: Sequence[Problem]) -> list[int]:
        """Return the number of tokens of each problem's prompt.

        Raises `ModelError` for a token that the model cannot look up.
        """
        if not problems:
            return []
        encoded = self._token_ids(problems)
        for problem, ids in zip(problems, encoded, strict=True):
            self._require_rows(problem, ids)
        return [len(ids) for ids in encoded]

    def _unexpanded(self, problems: Sequence[Problem]) -> list[list[int]]:
        """Return the tokens of each problem's prompt, with one for each picture."""
        texts = [self.text(problem) for problem in problems]
        return self.tokenizer(texts, add_special_tokens=self._plain)["input_ids"]

    def _token_ids(self, problems: Sequence[Problem]) -> list[list[int]]:
        """Return the tokens of each problem's prompt, with all that stand for its pictures."""
        return [
            self._pictures.expanded(problem, self.text(problem), ids, self._plain)
            for problem, ids in zip(problems, self._unexpanded(problems), strict=True)
        ]

    def _require_rows(self, problem: Problem, ids: Sequence[int]) -> None:
        what = f"the prompt of problem {problem.id!r} ({quoted(problem.question)})"
        self.vocabulary.require([ids], what, self.tokenizer)

    def _opened(self, problem: Problem) -> Problem:
        """Return the problem with the text of an environment's `reset` after the question."""
        opening = self._environments.opening(problem) if self._environments else ""
        if not opening:
            return problem
        *before, last = problem.chat
        messages = ()
        if problem.messages:
            messages = (*before, {**last, "content": last["content"] + opening})
        return replace(problem, question=problem.question + opening, messages=messages)

    @property
    def _plain(self) -> bool:
        return self.tokenizer.chat_template is None

    def _refuse_ignored(self) -> None:
        """Raise `ConfigError` for an argument that the template does not mention, so ignores."""
        templates = self.tokenizer.chat_template or ""
        words = set(re.findall(r"\w+", str(templates)))
        for name in self._template:
            if name not in words:
                fault = f"has a chat template that does not mention {name}"
                if self._plain:
                    fault = "has no chat template"
                option = f"task.template.{name} {self._template[name]!r}"
                if name == "tools":
                    option = "task.environment"
                raise ConfigError(
                    f"{option} has no effect: the tokenizer {fault}{did_you_mean(name, words)};"
                    " omit it, or take a model whose template has it"
                )


def open_prompter(model_folder: Path, rollout: RolloutConfig, task: TaskConfig) -> Prompter:
    """Open a prompter with a run's limits, template and environment.

    Raises `ModelError` for a tokenizer that cannot be loaded, and `TaskError` for an environment
    that cannot be used.
    """
    environments = None
    if task.environment:
        environments = open_environments(task.environment, task.time_limit)
    try:
        return Prompter(
            model_folder,
            rollout.max_prompt_tokens,
            task.template,
            environments,
            task.tool_parser,
            rollout.pictures,
        )
    except (ConfigError, ModelError):
        raise
    except Exception as error:  # whatever the tokenizer's files make transformers raise
        raise ModelError(
            f"the tokenizer of {str(model_folder)!r} cannot be loaded: {error}; check its"
            " tokenizer.json and tokenizer_config.json"
        ) from error


def sample(
    engine: SamplingEngine,
    speaker: Speaker | None,
    problems: Sequence[Problem],
    prompts: Sequence[Prompt],
    sampling: Sampling,
) -> Sampled:
    """Sample `sampling.samples` completions of each problem's prompt.

    They are answers, or conversations if there is a speaker; a conversation may have begun with
    another prompt, so the prompts are returned too. Raises what the engine and
    `qarl.conversations.converse` raise.
    """
    if speaker is None:
        return list(prompts), engine.generate(prompts, sampling)
    return completed(converse(engine, speaker, problems, prompts, sampling))


def score_groups(
    task: Task,
    problems: Sequence[Problem],
    prompts: Sequence[Prompt],
    completions: Sequence[Sequence[Completion]],
) -> list[Group]:
    """Return one group per problem, of the completions that have a reward: their own or the task's.

    Raises `qarl.tasks.RewardError` if a reward is not a finite number.
    """
    rewards = iter(task.rewards(responses_of(problems, completions)))
    groups = []
    for prompt, answers in zip(prompts, completions, strict=True):
        pairs = [(completion, next(rewards)) for completion in answers]
        scored = [(completion, reward) for completion, reward in pairs if reward is not None]
        groups.append(
            Group(
                prompt=prompt,
                completions=tuple(completion for completion, _ in scored),
                rewards=tuple(reward for _, reward in scored),
                unscored=len(answers) - len(scored),
            )
        )
    return groups


def responses_of(
    problems: Sequence[Problem], completions: Sequence[Sequence[Completion]]
) -> list[Response]:
    """Return every completion of each problem, in order, as a response to be judged."""
    return [
        Response(problem, completion.text, completion.token_ids, completion.reward)
        for problem, answers in zip(problems, completions, strict=True)
        for completion in answers
    ]
