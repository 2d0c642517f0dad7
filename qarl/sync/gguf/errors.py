"""The error of an export that cannot become a GGUF file."""

from qarl.configs.errors import InputError


class GgufError(InputError, heading="gguf"):
    """Export that a GGUF file cannot have exactly, or that was changed after it was written."""
