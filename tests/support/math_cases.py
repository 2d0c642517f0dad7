r"""Generated answers in \boxed{…} to mathematical references, most of them known to be right or wrong."""

import random
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """right: None where mathematicians might differ; math-verify decides."""

    reference: str
    text: str
    right: bool | None


Kind = Callable[[random.Random], tuple[str, str, bool | None]]


def _whole(rng: random.Random) -> tuple[str, str, bool | None]:
    number, off = rng.randrange(-10_000, 10_000), rng.choice((0, 0, 1, -3))
    return str(number), f"{number + off:,}" if rng.random() < 0.3 else str(number + off), not off


def _fraction(rng: random.Random) -> tuple[str, str, bool | None]:
    top, bottom, factor, off = rng.randrange(1, 40), rng.randrange(2, 40), rng.randrange(1, 5), rng.choice((0, 0, 1))
    written = rng.choice((r"\frac{%d}{%d}", r"\dfrac{%d}{%d}", r"\tfrac{%d}{%d}", "%d/%d"))
    return rf"\frac{{{top}}}{{{bottom}}}", written % (top * factor + off, bottom * factor), not off


def _unit(rng: random.Random) -> tuple[str, str, bool | None]:
    number, off = rng.randrange(1, 500), rng.choice((0, 0, 2))
    unit = rng.choice((r"\text{ cm}", r" \text{ miles}", r"\mathrm{ kg}", r"\%", r"^\circ", r"\$", r" \text{ units}^2"))
    shown = f"{unit}{number + off}" if unit == r"\$" else f"{number + off}{unit}"
    return str(number), shown, None if unit in (r"^\circ", r" \text{ units}^2") else not off


def _pair(rng: random.Random) -> tuple[str, str, bool | None]:
    a, b = rng.sample(range(-20, 20), 2)
    swapped = rng.random() < 0.3
    shown = f"({b}, {a})" if swapped else rng.choice((f"({a},{b})", rf"\left({a}, {b}\right)"))
    return f"({a}, {b})", shown, not swapped


def _words(rng: random.Random) -> tuple[str, str, bool | None]:
    days = ("Monday", "Tuesday", "Friday")
    reference, shown = rng.choice(days), rng.choice(days)
    return rf"\text{{{reference}}}", rf"\text{{{shown}}}", reference == shown


def _nested(rng: random.Random) -> tuple[str, str, bool | None]:
    number, off = rng.randrange(1, 999), rng.choice((0, 0, 1))
    return str(number), rng.choice((r"\boxed{%d}", "{%d}", "{{%d}}")) % (number + off), not off


def _digits(rng: random.Random) -> tuple[str, str, bool | None]:
    """10 kB of them."""
    digits = "".join(rng.choices("123456789", k=10_000))
    return digits, rng.choice((digits, digits[:-1] + "0")), None


def _broken(rng: random.Random) -> tuple[str, str, bool | None]:
    number = str(rng.randrange(1, 99))
    shown = rng.choice(
        ("", r"\frac{1}{0}", r"\sqrt{", "?", r"\frac{a}", r"\left(", "…", r"\text{}", "1 2 3 apples", "}{")
    )
    return number, shown, False


KINDS: tuple[Kind, ...] = (_whole, _fraction, _unit, _pair, _words, _nested, _digits, _broken)

SLOW = (
    "9^{9^{9^{9}}}", "99999999!", "10^{10^{10}}", r"\sum_{k=1}^{10^{10}} k", "{" * 3000 + "}" * 3000,
    "(1+" * 300 + "1" + ")" * 300, r"\sqrt{" * 60 + "2" + "}" * 60, "(x+1)^{500}", "1" * 4301 + "!" * 3,
)  # fmt: skip
"""Answers that cost a parser, or arithmetic, seconds or for ever. The reference is "1"; all are wrong."""


def cases(count: int, seed: int) -> list[Case]:
    """As many of every kind, in turn; the box stands in a sentence."""
    rng = random.Random(seed)
    made = []
    for number in range(count):
        reference, boxed, right = KINDS[number % len(KINDS)](rng)
        before = rng.choice(("", "So the answer is ", "We add 1 and 2, and get\n\n", "</think> **Answer** "))
        made.append(Case(reference, f"{before}$\\boxed{{{boxed}}}$", right))
    return made
