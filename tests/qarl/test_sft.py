"""`qarl sft`: what pairs become, its loss and gradient, and a run from pairs to export and
masters.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from qarl.cli.main import main
from qarl.configs.schema.task import TaskConfig
from qarl.learner.learner import Learner
from qarl.learner.row_logprobs import RowLogprobs
from qarl.quant.checkpoint.load import load_masters
from qarl.quant.digest import digested
from qarl.rollout.types import Completion, Group, Prompt
from qarl.run.policy import open_architecture
from qarl.run.prompts import Prompter
from qarl.sft.data import Pair, encode, read_pairs
from qarl.sft.run import sft_config
from qarl.sft.train import (
    accumulate_gradients,
    batch_rows,
    mean_loss,
    open_learner,
    pairs_batch,
    update,
)
from qarl.sync.export import export_masters
from qarl.tasks.base import Problem, TaskError, is_heldout
from tests.support.learners import make_learner, masters_of
from tests.support.models import low_bit

LENGTHS = [
    (3, 5),
    (7, 2),
    (1, 9),
    (4, 4),
    (2, 1),
    (6, 6),
]
"""Tokens of prompts and of completions."""


def random_pairs(vocabulary: int = 96) -> list[Group]:
    """Return groups of random tokens in the form that `encode` makes."""
    generator = torch.Generator().manual_seed(3)
    groups = []
    for prompt, completion in LENGTHS:
        tokens = torch.randint(0, vocabulary, (prompt + completion,), generator=generator).tolist()
        groups.append(pair_of(tuple(tokens[:prompt]), tuple(tokens[prompt:])))
    return groups


def pair_of(prompt: tuple[int, ...], completion: tuple[int, ...]) -> Group:
    answer = Completion(completion, (0.0,) * len(completion), "", 0, "stop")
    return Group(Prompt("p", "", prompt), (answer,), (0.0,))


def write_rows(file: Path, rows: list[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def gradients(learner: Learner, batch: Any) -> dict[str, torch.Tensor]:
    """Return the gradients of the batch's mean loss by master, and clear them."""
    accumulate_gradients(learner, batch, RowLogprobs(batch))
    found = {
        name: p.grad.clone() for name, p in learner.model.masters.items() if p.grad is not None
    }
    for master in learner.model.masters.values():
        master.grad = None
    return found


def test_loss_and_gradient_are_transformers_cross_entropy(random_policy):
    """Contract: unquantized in float32, the loss is cross-entropy over the completions' tokens and
    no others, averaged over all of them, and so are its gradients, up to the order of sums: 1e-6
    nats, 1e-4 of a master's largest. The folder's own weights are loaded a second time by
    transformers.
    """
    overrides = {
        "model": str(random_policy(True)),
        "scheme": "bf16",
        "dtype": "float32",
    }
    config = sft_config("pairs.jsonl", overrides, steps=1)
    learner = open_learner(config, open_architecture(config))
    batch = pairs_batch(random_pairs(vocabulary=512), pad_token=0)
    ours = gradients(learner, batch)
    model = AutoModelForCausalLM.from_pretrained(random_policy(True), dtype=torch.float32)
    labels = torch.full_like(batch.tokens, -100)
    for row, (prompt, completion) in enumerate(LENGTHS):
        labels[row, prompt : prompt + completion] = batch.tokens[row, prompt : prompt + completion]
    loss = model(input_ids=batch.tokens, attention_mask=batch.real().long(), labels=labels).loss
    loss.backward()
    assert mean_loss(learner, batch) == pytest.approx(float(loss.detach()), abs=1e-6)
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert ours.keys() == expected.keys()
    for name, gradient in ours.items():
        off = (gradient - expected[name]).abs().max()
        assert off <= 1e-4 * expected[name].abs().max(), name


@pytest.mark.parametrize("scheme", ["w4a16", "w8a8"])
def test_micro_batches_change_no_step(scheme: str):
    """Contract: cut into one sequence a forward, a batch has the same loss and gradient as at once,
    but for the order of sums: a mean over the batch's tokens, not over micro-batches of unequal
    length. Blind spot: fp32 alone.
    """
    batch = pairs_batch(random_pairs(), pad_token=0)
    whole = make_learner(scheme, torch.float32)
    cut = make_learner(scheme, torch.float32, micro_batch_tokens=1)
    assert len(list(cut.scorer.micro_batches(batch, torch.arange(len(LENGTHS))))) == len(LENGTHS)
    expected = gradients(whole, batch)
    for name, gradient in gradients(cut, batch).items():
        assert (gradient - expected[name]).abs().max() <= 1e-4 * expected[name].abs().max(), name
    done = update(cut, batch, step=0)
    assert done.loss == pytest.approx(update(whole, batch, step=0).loss, abs=1e-5)
    assert done.tokens == sum(completion for _, completion in LENGTHS)


def test_an_update_makes_the_codes_of_its_masters():
    learner = make_learner("w4a16")
    batch = pairs_batch(random_pairs(), pad_token=0)
    before = digested(learner.model.low_bit_tensors()).hexdigest()
    start = masters_of(learner)
    losses = [update(learner, batch, step).loss for step in range(4)]
    assert losses[-1] < losses[0]
    after = digested(learner.model.low_bit_tensors()).hexdigest()
    assert after != before
    assert any(not torch.equal(start[name], master) for name, master in masters_of(learner).items())
    learner.model.refresh()
    assert digested(learner.model.low_bit_tensors()).hexdigest() == after


def test_every_epoch_has_each_pair_once_in_an_order_of_its_own():
    steps = [batch_rows(step, 4, 10, epochs=2, seed=0) for step in range(5)]
    rows = [row for step in steps for row in step]
    assert sorted(rows[:10]) == sorted(rows[10:]) == list(range(10))
    assert rows[:10] != rows[10:]
    assert steps == [batch_rows(step, 4, 10, epochs=None, seed=0) for step in range(5)]
    assert [len(batch_rows(step, 6, 10, epochs=1, seed=0)) for step in range(2)] == [
        6,
        4,
    ]
    assert rows[:4] != batch_rows(0, 4, 10, epochs=None, seed=1)


@pytest.mark.parametrize("kind", ["tied", "untied", "experts"])
def test_masters_are_read_back_to_the_bit(kind: str, random_policy, random_experts, tmp_path: Path):
    """Contract: of tied and untied heads and of stacked experts, which checkpoints name one by
    one.
    """
    source = random_experts(True) if kind == "experts" else random_policy(kind == "tied")
    model = low_bit(load_masters(source, torch.float32), "w8a8")
    export_masters(model, source, tmp_path / "masters")
    again = load_masters(tmp_path / "masters", torch.float32)
    parameters = dict(again.named_parameters())
    assert parameters.keys() == model.loaded.keys()
    assert all(torch.equal(parameters[name], master) for name, master in model.loaded.items())
    assert str(source) not in (tmp_path / "masters/config.json").read_text()


FORMS = {
    "prompt and completion": {"prompt": "Say 4", "completion": "four"},
    "question and answer": {"question": "Say 4", "answer": "four"},
    "messages": {
        "messages": [
            {"role": "user", "content": "Say 4"},
            {"role": "assistant", "content": "four"},
        ]
    },
    "lists": {
        "prompt": [{"role": "user", "content": "Say 4"}],
        "completion": [{"role": "assistant", "content": "four"}],
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_row_is_the_same_tokens(form: str, random_policy, tmp_path: Path):
    """Contract: the prompt as RL asks it, the completion behind it, and the end token."""
    file = write_rows(tmp_path / "pairs.jsonl", [FORMS[form]])
    prompter = Prompter(random_policy(True), 512)
    (group,) = encode(
        prompter,
        read_pairs(TaskConfig(name=str(file)), 0.0),
        512,
    )
    tokenizer = prompter.tokenizer
    assert group.prompt.token_ids == prompter.prompt(Problem("1", "Say 4", "")).token_ids
    *answer, end = group.completions[0].token_ids
    assert tokenizer.decode(answer) == "four"
    assert end == tokenizer.eos_token_id


def test_the_last_turn_of_a_chat_is_learned_from_and_a_system_prompt_stands_before_text(
    tmp_path: Path,
):
    turns = [
        ("system", "S"),
        ("user", "1"),
        ("assistant", "2"),
        ("user", "3"),
        ("assistant", "4"),
    ]
    chat = [{"role": role, "content": content} for role, content in turns]
    file = write_rows(
        tmp_path / "pairs.jsonl",
        [{"messages": chat}, {"prompt": "3", "completion": "4"}],
    )
    of_chat, of_text = (
        pair.problem for pair in read_pairs(TaskConfig(name=str(file), system="T"), 0.0)
    )
    assert (list(of_chat.messages), of_chat.answer) == (chat[:-1], "4")
    assert [message["content"] for message in of_text.messages] == ["T", "3"]


def test_held_out_pairs_are_those_that_a_task_holds_out(tmp_path: Path):
    """Contract: at the default fraction, those of RL on the same file; a larger fraction has them
    all, and a row's own split comes first.
    """
    rows: list[dict[str, Any]] = [{"question": f"Say {n}", "answer": str(n)} for n in range(300)]
    task = TaskConfig(name=str(write_rows(tmp_path / "pairs.jsonl", rows)))

    def heldout(fraction: float) -> set[str]:
        return {pair.problem.question for pair in read_pairs(task, fraction) if pair.heldout}

    assert heldout(0.125) == {row["question"] for row in rows if is_heldout(row["question"])}
    assert heldout(0.05) < heldout(0.125) < heldout(0.3)
    assert len(heldout(0.3)) == pytest.approx(90, abs=25)
    assert heldout(0.0) == set()
    write_rows(
        tmp_path / "pairs.jsonl",
        [{**row, "split": "heldout" if n < 3 else "train"} for n, row in enumerate(rows)],
    )
    assert heldout(0.0) == heldout(0.3) == {"Say 0", "Say 1", "Say 2"}
    write_rows(tmp_path / "pairs.jsonl", [{**row, "split": "train"} for row in rows])
    assert heldout(0.125) == set()
    write_rows(tmp_path / "pairs.jsonl", [{**row, "split": "heldout"} for row in rows])
    with pytest.raises(TaskError, match=r'every row of .* has "split": "heldout"; give the rows'):
        heldout(0.125)


REFUSED_ROWS = [
    pytest.param(
        {"text": "1 + 1 = 2"},
        (
            "a row needs the columns messages, or prompt and completion, or question and "
            "answer, one of these alone; it has text"
        ),
        id="a-row-needs-the",
    ),
    pytest.param(
        {"prompt": "1", "completion": "2", "question": "1", "answer": "2"},
        "one of these alone; it has prompt, completion, question, answer",
        id="one-of-these-alone",
    ),
    pytest.param(
        {"prompt": " ", "completion": "2"},
        "'prompt' must be text, or a list of messages",
        id="prompt-must-be-text",
    ),
    pytest.param(
        {"prompt": "1", "completion": None},
        "'completion' must be text",
        id="completion-must-be-text",
    ),
    pytest.param({"prompt": "1", "completion": True}, "got true", id="got-true"),
    pytest.param(
        {"prompt": "1", "completion": [{"role": "user", "content": "2"}]},
        "'completion' must end with a message of the assistant",
        id="completion-must-end-with",
    ),
    pytest.param(
        {"messages": [{"role": "assistant", "content": "2"}]},
        "'messages' must end with a message of the assistant, after another one",
        id="messages-must-end-with",
    ),
    pytest.param(
        {"messages": [{"role": "user", "content": "1"}]},
        "'messages' must end with a message of the assistant",
        id="messages-must-end-with-a",
    ),
    pytest.param(
        {"messages": [{"role": "robot", "content": "1"}, {"role": "assistant", "content": "2"}]},
        "of role system, user, assistant; got {'role': 'robot'",
        id="of-role-system-user",
    ),
    pytest.param(
        {"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": None}]},
        "got {'role': 'assistant', 'content': None}",
        id="got-role-assistant-content",
    ),
    pytest.param(
        {
            "messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}],
            "tools": [{"name": "f"}],
        },
        "column 'tools' would not be shown to the model",
        id="column-tools-would-not",
    ),
    pytest.param(
        {"prompt": "1", "completion": "2", "split": "test"},
        "unknown split 'test'; allowed: train, heldout",
        id="unknown-split-test-allowed",
    ),
]


@pytest.mark.parametrize(("row", "said"), REFUSED_ROWS)
def test_a_row_that_cannot_be_used_is_refused_by_its_line(row: Any, said: str, tmp_path: Path):
    file = write_rows(tmp_path / "pairs.jsonl", [FORMS["messages"], row])
    with pytest.raises(TaskError) as error:
        read_pairs(TaskConfig(name=str(file)), 0.0)
    assert "pairs.jsonl:2: " in str(error.value)
    assert said in str(error.value)


def test_empty_and_long_pairs_are_refused(random_policy):
    prompter = Prompter(random_policy(True), 10**6)
    pairs = [
        Pair(Problem(f"p:{n}", "Say 4", text), heldout=False)
        for n, text in enumerate(["four", "", "4" * 600])
    ]
    with pytest.raises(TaskError, match="p:1: the completion '' has no token"):
        encode(prompter, pairs, 512)
    with pytest.raises(
        TaskError,
        match=r"1 of 2 pairs are longer than the model's 512 positions: p:2 \(6\d\d tokens\)",
    ):
        encode(prompter, pairs[::2], 512)


REFUSED_COMMANDS = [
    ("", "needs --data"),
    ("--data nope.jsonl", "nope.jsonl does not exist"),
    ("--data empty.jsonl", "--data empty.jsonl is empty; give lines like"),
    (
        "--data pairs.txt",
        "--data 'pairs.txt' must be a .jsonl, .csv, .tsv, .parquet file, or hf:ID",
    ),
    ("--data pairs.jsonl", "--heldout 0.125 sets none of the 3 pairs of pairs.jsonl aside"),
    ("--data pairs.jsonl --heldout 0.99", "--heldout 0.99 sets all of the 3 pairs"),
    ("--data pairs.jsonl --heldout 1", "'1' must be a number from 0 to below 1"),
    (
        "--data pairs.jsonl --heldout 0",
        "--batch 32 is more than the 3 pairs to learn from; give at most 3",
    ),
    ("--data pairs.jsonl --steps 2 --epochs 1", "--steps 2 and --epochs 1 both say how long"),
    ("--data pairs.jsonl --steps 0", "--steps '0' must be a whole number from 1 up"),
    (
        ("--data pairs.jsonl --heldout 0 --batch 1 --steps 2 --learner.optimizer.warmup_steps 9"),
        "warmup_steps 9 and decay_steps 0 are more than steps 2",
    ),
    ("--data pairs.jsonl --scheme w3a16", "w3a16"),
    ("--data pairs.jsonl --model tiny-qwen", "did you mean 'tiny-qwen3'?"),
    ("--data pairs.jsonl --output .", "run folder '.' exists"),
    (
        "--data pairs.jsonl --task x.jsonl",
        "--task 'x.jsonl' has no effect in `qarl sft`; name the pairs by --data",
    ),
    (
        "--data pairs.jsonl --samples 4",
        "--samples '4' has no effect in `qarl sft`; omit it",
    ),
    ("--data pairs.jsonl --learner.lora.name lora", "--learner.lora.name 'lora' has no effect"),
    ("--data pairs.jsonl --learner.aligned false", "--aligned 'false' has no effect"),
    ("--data pairs.jsonl --lr 0", "must be greater than 0"),
    ("--data pairs.jsonl --task.split test", "--task.split test is for a Hugging Face data set"),
    ("--data pairs.jsonl --stepz 3", "unknown option --stepz"),
]


@pytest.mark.parametrize(("arguments", "said"), REFUSED_COMMANDS)
def test_a_wrong_command_is_one_message_and_nothing_is_left(
    arguments: str, said: str, tmp_path: Path, capsys, monkeypatch
):
    """Contract: commands are refused before torch is imported and the model is looked up."""
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "pairs.jsonl", [FORMS["messages"]] * 3)
    (tmp_path / "empty.jsonl").write_text("")
    before = sorted(tmp_path.iterdir())
    assert main(["sft", *arguments.split()]) == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert sorted(tmp_path.iterdir()) == before


def test_a_run_lowers_the_held_out_loss_and_exports_the_codes_of_its_masters(
    random_policy, tmp_path: Path, capsys
):
    """Contract: end to end in w4a16, without an engine; masters/ quantized anew give export/ to the
    digest. A server of export/ asks behind the pairs' system prompt, which requests do not give.
    """
    rows = [{"prompt": f"Repeat {n % 10}", "completion": f"{n % 10}{n % 10}"} for n in range(64)]
    for n, row in enumerate(rows):
        row["split"] = "heldout" if n >= 48 else "train"
    data = write_rows(tmp_path / "pairs.jsonl", rows)
    model = random_policy(True)
    options = [
        "--batch",
        "16",
        "--epochs",
        "4",
        "--lr",
        "3e-3",
        "--learner.optimizer.warmup_steps",
        "2",
        "--task.system",
        "Be brief.",
    ]
    assert (
        main(
            [
                "sft",
                "--data",
                str(data),
                "--model",
                str(model),
                "--output",
                str(tmp_path / "run"),
                *options,
            ]
        )
        == 0
    )
    text = capsys.readouterr().out
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert lines[0]["lr"] == pytest.approx(1.5e-3)
    assert lines[0]["tokens"] == 16 * 3
    note = json.loads((tmp_path / "run/export/qarl.json").read_text())
    before, after = note["sft"]["heldout_loss"]
    assert after < 0.7 * before
    assert f"{before:.4f} nats a token before, {after:.4f} after (16 pairs)" in text
    assert f"qarl train --model {tmp_path / 'run/masters'} --scheme w4a16" in text
    assert "served as evaluated: 16 of 16 questions" in text
    assert note["served"] == {"questions": 16, "equal": 16, "difference": None}
    assert "Be brief." in (tmp_path / "run/export/README.md").read_text()
    masters = load_masters(tmp_path / "run/masters", torch.float32)
    assert digested(low_bit(masters, "w4a16").low_bit_tensors()).hexdigest() == note["digest"]
    assert not (tmp_path / "run/config.yaml").exists(), (
        "it is not a run that train --resume goes on with"
    )
