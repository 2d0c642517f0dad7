"""The embedded policies: very small Qwen3 and Qwen3-MoE models, for short and for long answers.

They exist so that a whole RL run, real engine included, fits a laptop. They are built from recipes
on first use and cached, as real transformers model folders: Qwen3 architecture, byte-level BPE
tokenizer, ChatML template. A supervised warm start on their task (two-term `chain_sum`, or the
running totals of `running_total`) makes them right part of the time, which gives RL something to
reward and room to improve.

The build is deterministic on one machine: it uses fixed seeds and a single thread (which also keeps
it fast if cores are shared). Other CPU models may sum in another order and give other bits, hence a
slightly different policy.
"""

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from qarl.configs.errors import ModelError
from qarl.configs.functions import FunctionKind, load_function
from qarl.configs.schema.task import TaskConfig
from qarl.embedded.cache import cached_path, ensure_cached, to_stderr
from qarl.embedded.tokenizer import (
    CHAT_TEMPLATE,
    EOS,
    TOOL_RESULT,
    TOOL_TEMPLATE,
    token_ids,
    train_tokenizer,
)
from qarl.learner.optim.optimizer import matrices_of
from qarl.tasks import Problem, load_task, solution_of
from qarl.tasks.environment_host import describe

TinyModel = Qwen3ForCausalLM | Qwen3MoeForCausalLM

OWN_PROBLEMS = 2000
"""Number of questions of the policy's own task that the tokenizer is trained on."""
OTHER_PROBLEMS = {
    "products": 200,
    "gcd": 200,
    "basic_arithmetic": 200,
    "number_sorting": 100,
}
"""Numbers of questions of other tasks that the tokenizer is trained on."""
IGNORED = -100
"""Label of a position that is not trained on (cross_entropy's default)."""
_WIDENED = 16
"""`widen_columns` widens every column whose index is a multiple of this."""


@dataclass(frozen=True)
class TinyRecipe:
    """Everything that decides the bytes of a tiny policy, besides library versions and the CPU.

    Fields of the architecture are those of `Qwen3Config`, and of `Qwen3MoeConfig` if there are
    experts. Inputs of a Linear are multiples of 128 (W4A16's group size), outputs of 32 (the tile
    of low-bit kernels).
    """

    version: int = 1
    """Version of the recipe's code."""
    task: str = "chain_sum"
    """Task that the warm start teaches."""
    hidden_size: int = 128
    intermediate_size: int = 256
    """Size of the feed-forward layers if there are no experts."""
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    vocab_size: int = 512
    max_position_embeddings: int = 512
    tie_word_embeddings: bool = True
    num_experts: int = 0
    """Experts per layer, each of `moe_intermediate_size`; 0 for a dense model."""
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 128
    norm_topk_prob: bool = True
    seed: int = 0
    """Seed of initialization and warm start."""
    warm_start_steps: int = 150
    """Steps of the warm start; 0 leaves the weights at random initialization."""
    warm_start_batch: int = 256
    """Problems per step."""
    warm_start_lr: float = 5e-3
    """Peak learning rate."""
    warm_start_weight_decay: float = 0.1
    outliers: float = 1.0
    """Factor of `widen_columns` after the warm start; 1 leaves the weights as trained."""
    environment: str | None = None
    """Class whose tools the template describes and the solutions call."""
    task_options: dict[str, Any] | None = None
    """Options of the task."""


_LONG = TinyRecipe(task="running_total", warm_start_steps=300, warm_start_batch=64, outliers=4.0)
RECIPES = {
    "tiny-qwen3": TinyRecipe(),
    "tiny-qwen3-moe": TinyRecipe(num_experts=8),
    "tiny-qwen3-long": _LONG,
    "tiny-qwen3-moe-long": dataclasses.replace(_LONG, num_experts=8),
    "tiny-qwen3-tools": TinyRecipe(
        task="lookup_sum",
        environment="qarl.embedded.lookup:Lookup",
        warm_start_steps=160,
        warm_start_batch=64,
        outliers=2.0,
    ),
}


def ensure_tiny(name: str) -> Path:
    """Return the model folder of one of `RECIPES`, built now if the cache lacks it.

    Raises `ValueError` for another name.
    """
    if name not in RECIPES:
        raise ValueError(f"unknown embedded policy {name!r}; known: {', '.join(sorted(RECIPES))}")
    return ensure_recipe(name, RECIPES[name])


def ensure_recipe(name: str, recipe: TinyRecipe, cache: Path | None = None) -> Path:
    """Return the folder `<cache>/<name>-<hash of recipe and versions>`, built now if it is missing.

    The build is announced on stderr. If several processes ask at the same time, one builds and the
    others wait. A folder appears complete or not at all.

    cache: folder of the cache. Default: $QARL_CACHE, else ~/.cache/qarl.

    Raises `ModelError` if the folder is missing and the cache cannot be written.
    """
    return ensure_cached(name, _recipe_folder(name, recipe, cache), partial(build_tiny, recipe))


def build_tiny(recipe: TinyRecipe, directory: Path) -> None:
    """Write the recipe's model folder into `directory`, which is created if it is missing.

    The caller's random state and thread count are unchanged afterwards.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with _deterministic(recipe.seed):
        tokenizer = recipe_tokenizer(recipe)
        model = initial_model(recipe, tokenizer)
        if recipe.warm_start_steps:
            warm_start(model, tokenizer, recipe)
        widen_columns(dict(model.named_parameters()), recipe.outliers)
    # Keep the template inside tokenizer_config.json.
    tokenizer.save_pretrained(directory, save_jinja_files=False)
    model.save_pretrained(directory)


@torch.no_grad()
def widen_columns(state: dict[str, torch.Tensor], factor: float) -> None:
    """Multiply every 16th column of the projections' weights by `factor`, in place.

    It widens q, k, v, gate, up and down projections of a Qwen3 or Qwen3-MoE, and divides what feeds
    these columns: the norm's weight, or the row of the up projection. The model's function stays
    the same, and coarse low-bit codes become less accurate.

    Weights of large models have such columns, and a scale that is shared with one leaves few codes
    to the other columns. The embedded policies are too small to grow any: by fourth moments their
    weights are normally distributed (kurtosis 3.2), and four bits with one scale per row cost them
    little.

    state: the model's parameters by name, [O, I]; stacked experts are [E, O, I], with gate and up
    in one tensor. Exact for powers of two; otherwise each product is rounded once.
    """
    widened = ("_proj.weight", ".gate.weight", ".gate_up_proj", ".down_proj")
    feeding = ("input_layernorm.weight", "post_attention_layernorm.weight", "up_proj.weight")
    for name, weight in state.items():
        if name.endswith(widened) and "o_proj" not in name:
            weight[..., ::_WIDENED] *= factor
        if name.endswith(feeding):
            weight[::_WIDENED] /= factor
        if name.endswith(".gate_up_proj"):
            # The second half of a stack's rows is its up projection.
            weight[:, weight.shape[1] // 2 :: _WIDENED] /= factor


def recipe_tokenizer(recipe: TinyRecipe) -> PreTrainedTokenizerFast:
    """Train the tokenizer of a recipe, on questions and answers of its task and of others."""
    template = TOOL_TEMPLATE if recipe.environment else CHAT_TEMPLATE
    return train_tokenizer(
        _tokenizer_texts(recipe),
        recipe.vocab_size,
        recipe.max_position_embeddings,
        template,
    )


def recipe_config(recipe: TinyRecipe, **more: Any) -> Qwen3Config | Qwen3MoeConfig:
    """Return the architecture of a recipe.

    more: further fields of the config.
    """
    # The recipe's other fields are no attributes of the config class.
    kind = Qwen3MoeConfig if recipe.num_experts else Qwen3Config
    fields = dataclasses.asdict(recipe)
    sizes: dict[str, Any] = {name: fields[name] for name in fields if hasattr(kind, name)}
    return kind(**sizes, **more)


def initial_model(recipe: TinyRecipe, tokenizer: PreTrainedTokenizerFast) -> TinyModel:
    """Return a randomly initialized fp32 model of the recipe's sizes.

    It draws from torch's global generator.
    """
    end = tokenizer.eos_token_id
    pad = tokenizer.pad_token_id
    kind = Qwen3MoeForCausalLM if recipe.num_experts else Qwen3ForCausalLM
    model = kind(recipe_config(recipe, eos_token_id=end, pad_token_id=pad, dtype="float32"))
    model.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=pad)
    return model


def warm_start(model: TinyModel, tokenizer: PreTrainedTokenizerFast, recipe: TinyRecipe) -> None:
    """Train the model in place, in fp32, on solutions and end tokens of fresh training problems.

    Muon trains weight matrices, because it needs about half of AdamW's steps for this task. AdamW
    trains embeddings and norms. Both have one learning rate, warmed up over 20 steps and decayed to
    0 over the last 30 %.
    """
    task = load_task(TaskConfig(name=recipe.task, options=recipe.task_options or {}))
    steps = recipe.warm_start_steps
    batch = recipe.warm_start_batch
    problems = task.problems("train", 0, steps * batch, recipe.seed)
    ids, labels = encode_problems(tokenizer, problems, _tools(recipe))
    optimizers = _optimizers(model, recipe)
    model.train()
    for step in range(steps):
        rows = slice(step * batch, (step + 1) * batch)
        loss = _answer_loss(model, ids[rows], labels[rows])
        loss.backward()
        factor = min(1.0, (step + 1) / 20, (steps - step) / (0.3 * steps))
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = recipe.warm_start_lr * factor
            optimizer.step()
        model.zero_grad(set_to_none=False)
        if step % 20 == 0 or step == steps - 1:
            to_stderr(f"warm start: step {step + 1}/{steps}, loss {loss.item():.3f} nats/token")
    model.eval()


def encode_problems(
    tokenizer: PreTrainedTokenizerFast, problems: list[Problem], tools: Any = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode problems and their solutions as training rows.

    tools: JSON schemas that the template describes, or None.

    Returns:
        Token ids [B, T] int64, padded on the right, and labels [B, T] int64: the tokens of the
        solution, or of its turns, and their end tokens in place (unshifted), `IGNORED` elsewhere.
    """
    chats = [[{"role": "user", "content": problem.question}] for problem in problems]
    prompts: Any = tokenizer.apply_chat_template(
        chats, tools=tools, add_generation_prompt=True, tokenize=False
    )
    rows = []
    labels = []
    for prompt, problem in zip(prompts, problems, strict=True):
        parts = [(prompt, False), *_solution(problem)]
        encoded = token_ids(tokenizer, [text for text, _ in parts])
        targets = [
            ids if own else torch.full_like(ids, IGNORED)
            for ids, (_, own) in zip(encoded, parts, strict=True)
        ]
        rows.append(torch.cat(encoded))
        labels.append(torch.cat(targets))
    pad: Any = tokenizer.pad_token_id
    ids = pad_sequence(rows, batch_first=True, padding_value=pad)
    return ids, pad_sequence(labels, batch_first=True, padding_value=IGNORED)


def _solution(problem: Problem) -> Iterator[tuple[str, bool]]:
    """Yield the parts that follow a prompt, each with whether the policy writes it.

    The parts are tool calls, their results, and the solution.
    """
    for name, number in problem.metadata.get("values_by_name", {}).items():
        call = json.dumps({"name": "lookup", "arguments": {"name": name}})
        yield f"<tool_call>{call}</tool_call>{EOS}", True
        for text in (TOOL_RESULT[0], str(number), TOOL_RESULT[1]):
            yield text, False
    yield solution_of(problem) + EOS, True


def _tools(recipe: TinyRecipe) -> list[dict[str, Any]] | None:
    if recipe.environment is None:
        return None
    kind = FunctionKind("environment", "with tools", ModelError, "class")
    environment = load_function(kind, recipe.environment)
    return list(describe(recipe.environment, environment).tools)


def _answer_loss(model: TinyModel, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy over the labelled tokens, in nats.

    Logits are computed for these tokens only.
    """
    hidden = model.model(input_ids=ids).last_hidden_state[:, :-1]
    labels = labels[:, 1:]
    labelled = labels != IGNORED
    return cross_entropy(model.lm_head(hidden[labelled]), labels[labelled])


def _optimizers(model: TinyModel, recipe: TinyRecipe) -> list[torch.optim.Optimizer]:
    """Return Muon and AdamW.

    Muon trains each matrix of stacked experts by itself: a view of the stack, with a view of the
    stack's gradient.
    """
    matrices = []
    experts = []
    others = []
    for name, parameter in model.named_parameters():
        if parameter.ndim == 3:
            parameter.grad = torch.zeros_like(parameter)
            for index in matrices_of(name, parameter.shape):
                matrix = torch.nn.Parameter(parameter.detach()[index])
                matrix.grad = parameter.grad[index]
                experts.append(matrix)
        elif "layers." in name and parameter.ndim == 2:
            matrices.append(parameter)
        else:
            others.append(parameter)
    lr = recipe.warm_start_lr
    decay = recipe.warm_start_weight_decay
    muon = torch.optim.Muon(
        [*matrices, *experts], lr=lr, weight_decay=decay, adjust_lr_fn="match_rms_adamw"
    )
    adamw = torch.optim.AdamW(others, lr=lr, weight_decay=0.0, betas=(0.9, 0.98))
    return [muon, adamw]


def _tokenizer_texts(recipe: TinyRecipe) -> Iterator[str]:
    for name, count in {recipe.task: OWN_PROBLEMS, **OTHER_PROBLEMS}.items():
        options = (recipe.task_options if name == recipe.task else None) or {}
        task = load_task(TaskConfig(name=name, options=options))
        for problem in task.problems("train", 0, count, recipe.seed):
            yield problem.question
            yield from (text.removesuffix(EOS) for text, own in _solution(problem) if own)
    for tool in _tools(recipe) or []:
        yield from [json.dumps(tool)] * OWN_PROBLEMS
    for role in ("system", "user", "assistant"):
        yield from [f"{role}\n"] * OWN_PROBLEMS


@contextmanager
def _deterministic(seed: int) -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_num_threads(threads)


def _recipe_folder(name: str, recipe: TinyRecipe, cache: Path | None) -> Path:
    libraries = ("torch", "transformers", "tokenizers", "reasoning-gym")
    versions = {library: version(library) for library in libraries}
    # Fields that are None are left out, so that a new one does not change the older folders' names.
    fields = {
        field: value for field, value in dataclasses.asdict(recipe).items() if value is not None
    }
    return cached_path(name, {**fields, "versions": versions}, cache)
