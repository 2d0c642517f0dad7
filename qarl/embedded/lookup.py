"""The tool of `tiny-qwen3-tools`."""

import random


class Lookup:
    """Looks up numbers by their names in a `lookup_sum` problem."""

    def reset(self, values_by_name: dict[str, int] | None = None) -> None:
        """Begin a problem. Default: every name has a number, as in `qarl sample`."""
        self._numbers = values_by_name or {
            f"{name:02d}": random.randint(1, 9) for name in range(100)
        }

    # The docstring is part of the policy's prompt, and its tokenizer was trained on it
    # (`qarl.embedded.recipe`): another text makes another policy.
    def lookup(self, name: str) -> str:
        """A number by its name.

        Args:
            name: two digits
        """
        if name not in self._numbers:
            raise ValueError(f"no number is called {name}")
        return str(self._numbers[name])
