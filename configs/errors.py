"""Errors whose message says all a person needs: the value, what is allowed, the remedy. Imports nothing heavy, so that
naming an error costs nothing."""

from typing import ClassVar


class QarlError(Exception):
    """Base of every error a person can cause or mend; shown as `heading: message`, without a traceback.

    heading: what kind it is, in a word or two. exit_status: of the command, 2 for unusable input, 1 for a run that
    failed.
    """

    heading: ClassVar[str] = "error"
    exit_status: ClassVar[int] = 1


class InputError(QarlError, ValueError):
    """Something that was given cannot be used; found before anything is changed."""

    heading: ClassVar[str] = "input"
    exit_status: ClassVar[int] = 2


class ConfigError(InputError):
    """A configuration that cannot be used."""

    heading: ClassVar[str] = "configuration"


class SchemeError(InputError):
    """A scheme that is unknown, or that a layer of the model cannot take."""

    heading = "scheme"


class ModelError(InputError):
    """A model that is missing, incomplete, already quantized, or of a kind that cannot be trained."""

    heading = "model"


class PolicyError(InputError):
    """A policy or its engine asked for something out of turn, or for tokens that it cannot take."""

    heading = "policy"


class PrecisionError(QarlError, ValueError):
    """Numbers left the range of their dtype, or were not finite to begin with."""

    heading = "precision"
