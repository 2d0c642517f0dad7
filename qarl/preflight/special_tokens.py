"""Notes of `qarl check` on special tokens: which one ends a turn, and which questions hold one."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from qarl.quant.checkpoint.folder import end_tokens
from qarl.report.finding import Finding
from qarl.run.prompts import Prompter
from qarl.tasks import Problem

_TURN = "«turn»"


def special_tokens(
    folder: Path, prompter: Prompter, problems: Sequence[Problem], stop: Sequence[str]
) -> Iterator[Finding]:
    """Yield a note if the template's end of a turn ends no completion, and one if questions hold
    special tokens.

    Args:
        folder: folder of the model.
        prompter: has the tokenizer and the template.
        problems: the problems that are looked at.
        stop: `rollout.stop`.
    """
    tokenizer = prompter.tokenizer
    special = {str(t): n for n, t in tokenizer.added_tokens_decoder.items() if t.special}
    ends = end_tokens(folder) | {tokenizer.eos_token_id} - {None}
    turn_end = _turn_end(prompter, special)
    if turn_end and ends and special[turn_end] not in ends and turn_end not in stop:
        names = ", ".join(repr(tokenizer.convert_ids_to_tokens(end)) for end in sorted(ends))
        yield Finding(
            "note",
            "end",
            f"the chat template ends a turn with {turn_end!r}, and generation ends at {names}"
            " alone: a completion that ends as the template does runs on",
            f"--rollout.stop '{turn_end}'",
        )
    holding = {
        token: sum(token in _text(problem) for problem in problems) for token in special if token
    }
    counts = {token: count for token, count in holding.items() if count}
    if counts:
        tokens = ", ".join(f"{token!r} in {count}" for token, count in counts.items())
        yield Finding(
            "note",
            "question",
            f"special tokens in questions are read as tokens, as chats of transformers and vLLM do:"
            f" {tokens} of {len(problems)}",
        )


def _text(problem: Problem) -> str:
    return "\n".join(str(message.get("content", "")) for message in problem.chat)


def _turn_end(prompter: Prompter, special: dict[str, int]) -> str:
    """Return the first special token that the template writes after a turn; "" if there is none."""
    if prompter.tokenizer.chat_template is None:
        return ""
    chat = ({"role": "user", "content": "?"}, {"role": "assistant", "content": _TURN})
    try:
        text = prompter.text(Problem("", "?", "", messages=chat))
    except Exception:  # a template may refuse this chat; it says nothing then
        return ""
    _, turn, after = text.partition(_TURN)
    places = {after.index(token): token for token in special if token in after}
    return places[min(places)] if turn and places else ""
