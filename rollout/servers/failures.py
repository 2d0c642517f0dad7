"""How one server can fail a run."""

from qarl.rollout.engine import EngineError


class LostServerError(EngineError):
    """A server that cannot be reached, shows no sign of life, or samples by other weights than were published last."""


class AnswerError(EngineError):
    """One answer that broke off or cannot be used: it may be asked for again."""


class BrokenAnswerError(AnswerError):
    """One that broke off on the way."""
