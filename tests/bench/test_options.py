"""Options of the laboratory's benchmarks, which are read before anything heavy is imported."""

from benchmarks import delta, names
from benchmarks.learner.trl_worker import SETTINGS
from benchmarks.models import MODELS


def test_names_are_those_of_what_is_measured():
    assert tuple(SETTINGS) == names.TRL_SETTINGS
    assert tuple(MODELS) == names.LEARNER_MODELS
    assert tuple(delta.SHAPES) == names.DELTA_SHAPES
