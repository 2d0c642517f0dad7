"""The schemes' names, so that a slip in one is found before anything heavy is imported. What a name means, bits and
ranges, is said in `quant.schemes` alone; a test holds the two lists together."""

from qarl.configs.errors import SchemeError
from qarl.configs.words import did_you_mean

SCHEME_NAMES = (
    "bf16", "w4a16", "w4a16-g64", "w4a16-g32", "w4a16-channel", "w8a16", "w8a8", "w4a8", "w4afp8", "fp8", "fp8-block",
    "nvfp4a16", "nvfp4", "mxfp4a16",
)  # fmt: skip


def check_scheme_name(name: str) -> None:
    """Raise `SchemeError` quoting an unknown name, the known ones and the nearest."""
    if name not in SCHEME_NAMES:
        raise SchemeError(
            f"unknown scheme {name!r}: known are {', '.join(map(repr, SCHEME_NAMES))}"
            f"{did_you_mean(name.lower(), SCHEME_NAMES)}"
        )
