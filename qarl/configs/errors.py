"""Errors whose message has all that a person needs: the value, what is allowed, and the remedy.

This module imports nothing heavy, so that naming an error costs nothing.
"""

import errno
import os
from typing import ClassVar

_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)
"""Numbers of the errors for a full disk, or one that the user may not write to."""


class QarlError(Exception):
    """Base of every error that a person can cause or fix, shown as `heading: message` without a
    traceback.

    A subclass gives the attributes in which it differs from its base: `class ModelError(InputError,
    heading="model")`.
    """

    heading: ClassVar[str] = "error"
    """Kind of error, in a word or two."""
    exit_status: ClassVar[int] = 1
    """Exit status of the command: 2 for unusable input, 1 for a run that failed."""

    def __init_subclass__(cls, heading: str | None = None, exit_status: int | None = None) -> None:
        cls.heading = cls.heading if heading is None else heading
        cls.exit_status = cls.exit_status if exit_status is None else exit_status


class InputError(QarlError, ValueError, heading="input", exit_status=2):
    """Input that cannot be used, found before anything is changed."""


class ConfigError(InputError, heading="configuration"):
    """Configuration that cannot be used."""


class SchemeError(InputError, heading="scheme"):
    """Scheme that is unknown, or that does not fit a layer of the model."""


class ModelError(InputError, heading="model"):
    """Model that is missing, incomplete, already quantized, or of a kind that cannot be trained."""


class GraphError(InputError, heading="operators"):
    """Engine's model that cannot be the learner's graph, or a use that it does not support."""


class NoEngineModelError(GraphError):
    """Model that vLLM cannot build on this machine, so that no engine here can sample from it."""


class PolicyError(InputError, heading="policy"):
    """Call of a policy or its engine out of turn, or with tokens that it cannot take."""


class PrecisionError(QarlError, ValueError, heading="precision"):
    """Numbers that left the range of their dtype, or were not finite to begin with."""


class DiskError(QarlError, heading="disk"):
    """Path that the system does not let us write to."""


class InstallError(QarlError, heading="installation", exit_status=2):
    """Packages of the environment that cannot be imported."""


def install_error(error: BaseException) -> InstallError | None:
    """Return an error that explains a failed import by its first cause; None for other errors."""
    if not isinstance(error, ImportError):
        return None
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    return InstallError(
        f"{cause}: packages here do not fit one another. In an empty environment pip install"
        " 'qarl-train[cpu]' --extra-index-url https://download.pytorch.org/whl/cpu, or"
        " 'qarl-train[cuda]';"
        " torchvision, torchaudio, torchcodec are not needed"
    )


def disk_error(error: BaseException) -> DiskError | None:
    """Return an error that explains a full disk, or one that the user may not write to, or None for
    other errors.
    """
    number = error.errno if isinstance(error, OSError) else None
    # libraries written in Rust raise errors of their own, with the system's number in the text
    number = number or next((each for each in _DISK if f"(os error {each})" in str(error)), None)
    if number not in _DISK:
        return None
    file = getattr(error, "filename", None)
    where = f" at {str(file)!r}" if file else ""
    return DiskError(
        f"cannot write or open{where}: {os.strerror(number)}; make room or give permission there,"
        " or name another place. Checkpoints that were written stay; a run that has one goes on"
        " with --resume RUN"
    )
