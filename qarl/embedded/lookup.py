"""The tool of the embedded policy that uses one."""

import random


class Lookup:
    """Numbers by their names, of a `lookup_sum` problem."""

    def reset(self, values_by_name: dict[str, int] | None = None) -> None:
        """Begin a problem. Where none is given, as in `qarl sample`, every name has a number."""
        self._numbers = values_by_name or {
            f"{name:02d}": random.randint(1, 9) for name in range(100)
        }

    def lookup(self, name: str) -> str:
        """A number by its name.

        Args:
            name: two digits
        """
        if name not in self._numbers:
            raise ValueError(f"no number is called {name}")
        return str(self._numbers[name])
