"""The list of what watches a batch."""

from qarl.learner.diagnostics.ages import MismatchByAgeMeter
from qarl.learner.diagnostics.base import Learning, Observer
from qarl.learner.diagnostics.decomposition import ShadowForwards
from qarl.learner.diagnostics.lost_updates import LostUpdates
from qarl.learner.diagnostics.starting_policy import StartDistance, StartingPolicy
from qarl.learner.diagnostics.token_record import TokenRecord


def observers(learning: Learning, start: StartingPolicy) -> list[Observer]:
    """Of one batch, in the order they are called in. start: of the run."""
    return [
        StartDistance(learning, start),
        MismatchByAgeMeter(learning),
        ShadowForwards(learning),
        LostUpdates(learning),
        TokenRecord(learning),
    ]
