"""Errors whose message says all a person needs: the value, what is allowed, the remedy. Imports
nothing heavy, so that naming an error costs nothing.
"""

import errno
import os
from typing import ClassVar

_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)


class QarlError(Exception):
    """Base of every error a person can cause or mend; shown as `heading: message`, without a
    traceback.

    heading: what kind it is, in a word or two. exit_status: of the command, 2 for unusable input, 1
    for a run that failed. A subclass names those that are not its base's: `class
    ModelError(InputError, heading="model")`.
    """

    heading: ClassVar[str] = "error"
    exit_status: ClassVar[int] = 1

    def __init_subclass__(cls, heading: str | None = None, exit_status: int | None = None) -> None:
        cls.heading = cls.heading if heading is None else heading
        cls.exit_status = cls.exit_status if exit_status is None else exit_status


class InputError(QarlError, ValueError, heading="input", exit_status=2):
    """Something that was given cannot be used; found before anything is changed."""


class ConfigError(InputError, heading="configuration"):
    """A configuration that cannot be used."""


class SchemeError(InputError, heading="scheme"):
    """A scheme that is unknown, or that a layer of the model cannot take."""


class ModelError(InputError, heading="model"):
    """A model that is missing, incomplete, already quantized, or of a kind that cannot be
    trained.
    """


class GraphError(InputError, heading="operators"):
    """The engine's model cannot be the learner's graph, or is asked for what it does not do."""


class PolicyError(InputError, heading="policy"):
    """A policy or its engine asked for something out of turn, or for tokens that it cannot take."""


class PrecisionError(QarlError, ValueError, heading="precision"):
    """Numbers left the range of their dtype, or were not finite to begin with."""


class DiskError(QarlError, heading="disk"):
    """The system takes no bytes where something is to be written."""


class InstallError(QarlError, heading="installation", exit_status=2):
    """Packages of this environment that cannot be imported."""


def install_error(error: BaseException) -> InstallError | None:
    """An import that failed, by its first cause, in words; None for other errors."""
    if not isinstance(error, ImportError):
        return None
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    return InstallError(
        f"{cause}: packages here do not fit one another. In an empty environment pip install"
        " 'qarl[cpu]' --extra-index-url https://download.pytorch.org/whl/cpu, or 'qarl[cuda]';"
        " torchvision, torchaudio, torchcodec are not needed"
    )


def disk_error(error: BaseException) -> DiskError | None:
    """An error that a full disk, or one that is not for this user to write, caused, in words; None
    for others. Libraries written in Rust raise their own, with the system's number in the text.
    """
    number = error.errno if isinstance(error, OSError) else None
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
