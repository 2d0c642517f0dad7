"""Lets vLLM start in a process that has imported numba.

llvmlite's library object answers every attribute name with a function, `__dict__` too. vLLM 0.32
looks on CPUs through the attributes of all modules (`vllm.triton_utils.dispatcher`), takes that
`__dict__` for a dictionary and fails with "'_lib_fn_wrapper' object has no attribute 'get'". Here
names of Python's own protocol are refused, as objects do. To be removed when
`hasattr(llvmlite.binding.ffi.lib, "__dict__")` is False without it.
"""

from typing import Any

from llvmlite.binding import ffi


def repair() -> None:
    """Idempotent; asserts that it took."""
    library: Any = type(ffi.lib)
    if hasattr(ffi.lib, "__dict__"):
        answer = library.__getattr__

        def answer_functions_only(self: Any, name: str) -> Any:
            if name.startswith("__") and name.endswith("__"):
                raise AttributeError(name)
            return answer(self, name)

        library.__getattr__ = answer_functions_only
    assert not hasattr(ffi.lib, "__dict__"), (
        "llvmlite's library object still claims a __dict__: vLLM would not start"
    )
