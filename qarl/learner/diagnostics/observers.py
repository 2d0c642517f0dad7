"""The list of diagnostics. To add one, write its file and add a line here."""

from qarl.learner.diagnostics.ages import MismatchByAgeMeter
from qarl.learner.diagnostics.base import Observer
from qarl.learner.diagnostics.decomposition import ShadowForwards
from qarl.learner.diagnostics.lost_updates import LostUpdates
from qarl.learner.diagnostics.start_distance import StartDistance
from qarl.learner.diagnostics.token_record import TokenRecord

OBSERVERS: tuple[type[Observer], ...] = (
    StartDistance,
    MismatchByAgeMeter,
    ShadowForwards,
    LostUpdates,
    TokenRecord,
)
"""All diagnostics, in the order in which they are called."""
