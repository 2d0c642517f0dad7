"""Options of the benchmarks: a slip is an error before anything heavy is imported."""

import subprocess
import sys

from benchmarks import delta, names
from benchmarks.learner.trl_worker import SETTINGS
from qarl.bench.models import MODELS

SLIPS = {
    "precision --dtype float8": "--dtype 'float8' must be one of bfloat16, float16, float32",
    "publish --master-dtype float64": "--master-dtype 'float64' must be one of bfloat16, float32",
    "learner --models 7b": "--models '7b' must be one of tiny, 150m",
    "learner --trl-settings fast": "--trl-settings 'fast' must be one of default, no-checkpointing, fp32",
    "train --targets 500": "--targets '500' must be percentages between 0 and 100",
    "soak --steps 39": "--steps '39' must be a whole number from 40 up",
    "memory --models 7b": "--models '7b' must be one of 40m, 150m, 70m-moe, 1b-moe",
    "delta --lrs fast": "--lrs 'fast' must be learning rates",
    "delivery --shape 7b": "--shape '7b' must be one of 0.6b, 1b-moe, tiny",
    "communication --processes 1": "--processes '1' must be different whole numbers from 2 up",
    "communication --stages 4": "--stages '4' must be one of 0, 1, 2, 3",
}


def test_a_slip_is_an_error_before_anything_heavy_is_imported():
    code = (
        "import sys; from benchmarks.__main__ import main\n"
        "for slip in sys.argv[1:]:\n"
        "    assert main(slip.split()) == 2\n"
        "assert not {'torch', 'vllm', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, *SLIPS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    errors = done.stderr.replace("\n", " ")
    assert not [message for message in SLIPS.values() if message not in errors]


def test_names_are_those_of_what_is_measured():
    assert tuple(SETTINGS) == names.TRL_SETTINGS
    assert tuple(MODELS) == names.LEARNER_MODELS
    assert tuple(delta.SHAPES) == names.DELTA_SHAPES
