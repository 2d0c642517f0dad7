"""Options of the laboratory's benchmarks: a slip is an error before anything heavy is imported."""

import subprocess
import sys

from benchmarks import delta, names
from benchmarks.learner.trl_worker import SETTINGS
from benchmarks.models import MODELS

SLIPS = {
    "speed --batches 1,,4": "--batches '1,,4' must be different whole numbers from 1 up",
    "speed --contexts 64,64": "--contexts '64,64' must be different",
    "mismatch --seed=-1": "--seed '-1' must be a whole number from 0 up",
    "precision --dtype float8": "--dtype 'float8' must be one of bfloat16, float16, float32",
    "train --targets 500": "--targets '500' must be percentages between 0 and 100",
    "delta --lrs fast": "--lrs 'fast' must be learning rates",
}


def test_a_slip_is_an_error_before_anything_heavy_is_imported():
    """All in one process, which at its end has imported neither torch nor vLLM."""
    code = (
        "import sys; from benchmarks.__main__ import main\n"
        f"assert {{main(slip.split()) for slip in {[*SLIPS]}}} == {{2}}\n"
        "assert not {'torch', 'vllm', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    errors = done.stderr.replace("\n", " ")
    assert not [message for message in SLIPS.values() if message not in errors]


def test_names_are_those_of_what_is_measured():
    assert tuple(SETTINGS) == names.TRL_SETTINGS
    assert tuple(MODELS) == names.LEARNER_MODELS
    assert tuple(delta.SHAPES) == names.DELTA_SHAPES
