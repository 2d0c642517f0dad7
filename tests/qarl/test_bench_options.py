"""Options of the benchmarks: slips are told as the command line is read."""

import json
import subprocess
import sys
from math import inf, nan
from pathlib import Path

from qarl.bench import delta, names
from qarl.bench.learner.batch import MODELS as LEARNER_MODELS
from qarl.bench.learner.trl_worker import SETTINGS
from qarl.cli.options import write_json

SLIPS = {
    "precision --dtype float8": "--dtype 'float8' must be one of bfloat16, float16, float32",
    "publish --master-dtype float64": "--master-dtype 'float64' must be one of bfloat16, float32",
    "learner --models 7b": "--models '7b' must be one of tiny, 150m",
    "learner --trl-settings fast": "--trl-settings 'fast' must be one of default, no-checkpointing, fp32",
    "train --targets 500": "--targets '500' must be percentages between 0 and 100",
    "speed --batches 1,,4": "--batches '1,,4' must be different whole numbers from 1 up",
    "speed --contexts 64,64": "--contexts '64,64' must be different",
    "speed --rounds 0": "--rounds '0' must be a whole number from 1 up",
    "speed --decode-tokens 3": "--decode-tokens '3' must be a whole number from 4 up",
    "mismatch --seed=-1": "--seed '-1' must be a whole number from 0 up",
    "soak --steps 39": "--steps '39' must be a whole number from 40 up",
    "memory --models 7b": "--models '7b' must be one of 40m, 150m, 70m-moe, 1b-moe",
    "delta --lrs fast": "--lrs 'fast' must be learning rates",
    "delivery --shape 7b": "--shape '7b' must be one of 0.6b, 1b-moe, tiny",
    "communication --processes 1": "--processes '1' must be different whole numbers from 2 up",
    "communication --stages 4": "--stages '4' must be one of 0, 1, 2, 3",
}


def test_a_slip_is_told_before_anything_heavy_is_imported():
    """All in one process, which at its end has imported neither torch nor vLLM."""
    code = (
        "import sys; from qarl.cli.main import main\n"
        "for slip in sys.argv[1:]:\n"
        "    assert main(['bench', *slip.split()]) == 2\n"
        "assert not {'torch', 'vllm', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, *SLIPS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told = done.stderr.replace("\n", " ")
    assert not [message for message in SLIPS.values() if message not in told]


def test_json_holds_no_nan(tmp_path: Path):
    write_json(str(tmp_path / "x.json"), {"low": nan, "rounds": [(1.0, inf)], "count": 1})
    assert json.loads((tmp_path / "x.json").read_text()) == {"low": None, "rounds": [[1.0, None]], "count": 1}


def test_names_are_those_of_what_is_measured():
    assert tuple(SETTINGS) == names.TRL_SETTINGS
    assert tuple(LEARNER_MODELS) == names.LEARNER_MODELS
    assert tuple(delta.SHAPES) == names.DELTA_SHAPES
