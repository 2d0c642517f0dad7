"""Repair of llvmlite that lets vLLM start in a process that has imported numba.

llvmlite's library object returns a function for every attribute name, `__dict__` included. On CPUs
vLLM 0.32 reads the attributes of all modules (`vllm.triton_utils.dispatcher`), takes that
`__dict__` for a dictionary and fails with "'_lib_fn_wrapper' object has no attribute 'get'". The
repair refuses names of Python's own protocol, as ordinary objects do. Remove it when
`hasattr(llvmlite.binding.ffi.lib, "__dict__")` is False without it.
"""

from typing import Any

from llvmlite.binding import ffi


def repair() -> None:
    """Make llvmlite's library object refuse `__dunder__` names, and assert that it does.

    Idempotent.
    """
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
