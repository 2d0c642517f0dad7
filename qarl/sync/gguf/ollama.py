"""Write the Modelfile by which Ollama serves a GGUF file as the policy was asked.

Ollama does not evaluate a Jinja chat template. Without a TEMPLATE line it compares the file's with
a list of known ones and takes the nearest, or none. So the template is derived here from what the
tokenizer's own writes around messages, and is used only if it writes the same for other talks.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Message = dict[str, str]
Render = Callable[[list[Message]], str]

_PROBES = ("QARLSYSTEM", "QARLFIRST", "QARLANSWER", "QARLSECOND")
"""Words that stand for the contents of messages."""
_QUOTES = '"""'


@dataclass(frozen=True)
class TalkTemplate:
    """Text around the messages of a conversation."""

    without_system: str
    """Text before the first message if there is no system prompt."""
    before_system: str
    """Text before a system prompt."""
    after_system: str
    """Text after a system prompt."""
    before_user: str
    """Text before a question."""
    after_user: str
    """Text after a question, up to the answer, in every turn."""
    before_answer: str
    """Further text before an answer of an earlier turn."""
    after_answer: str
    """Text after an answer."""
    before_generation: str
    """Further text before the answer that is to be generated."""

    def text(self, messages: Sequence[Message]) -> str:
        """Return the conversation as this template writes it."""
        around = {
            "system": (self.before_system, self.after_system),
            "user": (self.before_user, self.after_user),
            "assistant": (self.before_answer, self.after_answer),
        }
        text = "" if messages[0]["role"] == "system" else self.without_system
        for message in messages:
            before, after = around[message["role"]]
            text += before + message["content"] + after
        return text + self.before_generation

    def go(self) -> str:
        """Return this template in Ollama's language, that of Go's text/template."""
        return (
            f"{{{{ if not .System }}}}{self.without_system}{{{{ end }}}}"
            "{{ range .Messages }}"
            f'{{{{ if eq .Role "system" }}}}{self.before_system}{{{{ .Content }}}}'
            f"{self.after_system}"
            f'{{{{ else if eq .Role "user" }}}}{self.before_user}{{{{ .Content }}}}'
            f"{self.after_user}"
            f'{{{{ else if eq .Role "assistant" }}}}{self.before_answer}{{{{ .Content }}}}'
            f"{self.after_answer}{{{{ end }}}}"
            f"{{{{ end }}}}{self.before_generation}"
        )


def talk_template(render: Render, bos: str = "") -> TalkTemplate | None:
    """Derive the text around messages from a chat template.

    None if the template refuses a plain conversation, or writes anything that depends on more than
    the messages' roles.

    Args:
        render: returns the text of a conversation, up to the answer to be generated.
        bos: text of a token that llama.cpp puts before every text by itself; "" if none.
    """
    try:
        derived = _derive(lambda messages: render(messages).removeprefix(bos))
        talks = (talk(*shape) for shape in ((0, 1), (1, 1), (0, 2), (1, 2), (0, 3), (1, 3)))
        same = derived is not None and all(
            derived.text(messages) == render(messages).removeprefix(bos) for messages in talks
        )
    except Exception:
        # Jinja templates refuse roles by errors of their own making
        return None
    text = "".join(vars(derived).values()) if derived else ""
    return derived if same and "{{" not in text and _QUOTES not in text else None


def talk(systems: int, turns: int) -> list[Message]:
    """Return a conversation: a system prompt or none, and questions with answers but the last."""
    messages = [{"role": "system", "content": _PROBES[0]}] * systems
    for turn in range(turns):
        messages.append({"role": "user", "content": f"{_PROBES[1]} {turn}"})
        messages.append({"role": "assistant", "content": f"{_PROBES[2]} {turn}"})
    return messages[:-1]


def _derive(render: Render) -> TalkTemplate | None:
    system, first, answer, second = _PROBES
    turns = [
        {"role": "system", "content": system},
        {"role": "user", "content": first},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": second},
    ]
    parts = _parts(render(turns), _PROBES)
    alone = _parts(render([turns[1]]), (first,))
    if parts is None or alone is None:
        return None
    before_system, system_to_user, user_to_answer, answer_to_user, end = parts
    before_user = _common_end(system_to_user, _common_end(answer_to_user, alone[0]))
    after_user = _common_start(user_to_answer, end)
    return TalkTemplate(
        without_system=alone[0].removesuffix(before_user),
        before_system=before_system,
        after_system=system_to_user.removesuffix(before_user),
        before_user=before_user,
        after_user=after_user,
        before_answer=user_to_answer.removeprefix(after_user),
        after_answer=answer_to_user.removesuffix(before_user),
        before_generation=end.removeprefix(after_user),
    )


def _parts(text: str, words: Sequence[str]) -> list[str] | None:
    """Return the text around words, one more part than words; None unless each occurs once."""
    parts = []
    for word in words:
        before, separator, text = text.partition(word)
        if not separator or word in text:
            return None
        parts.append(before)
    return [*parts, text]


def _common_start(one: str, other: str) -> str:
    pairs = enumerate(zip(one, other, strict=False))
    return one[: next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))]


def _common_end(one: str, other: str) -> str:
    return _common_start(one[::-1], other[::-1])[::-1]


def modelfile(
    file: str,
    name: str,
    template: TalkTemplate | None,
    stops: Sequence[str],
    system: str | None,
    parameters: Mapping[str, Any],
) -> str:
    """Return the contents of a Modelfile.

    Args:
        file: name of the GGUF file beside it.
        name: name of the model in the commands that its comment has.
        template: text around messages; None if none could be derived.
        stops: texts that end an answer.
        system: system prompt; None for no prompt beyond the template's own.
        parameters: further parameters → values.
    """
    lines = [f"# ollama create {name} -f Modelfile", f"# ollama run {name}", f"FROM ./{file}"]
    if template is None:
        lines.append(
            "# no TEMPLATE: the chat template does not only depend on roles, so Ollama's choice may"
            " differ; llama.cpp's server (--jinja) evaluates the one in the file"
        )
    else:
        lines.append(f"TEMPLATE {_QUOTES}{template.go()}{_QUOTES}")
    if system is not None:
        lines.append(f"SYSTEM {_QUOTES}{system}{_QUOTES}")
    lines += [f"PARAMETER stop {_quoted(stop)}" for stop in stops]
    lines += [f"PARAMETER {key} {value}" for key, value in parameters.items()]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    """Return a text in the quotes of a Modelfile, which have no escapes: with three if it has one.

    A line break stands as itself.
    """
    quotes = _QUOTES if '"' in text or "\n" in text else '"'
    return f"{quotes}{text}{quotes}"
