"""Options of the benchmarks: slips are told as the command line is read."""

import json
import subprocess
import sys
from math import inf, nan
from pathlib import Path

from qarl.cli.options import write_json

SLIPS = {
    "speed --batches 1,,4": "--batches '1,,4' must be different whole numbers from 1 up",
    "speed --contexts 64,64": "--contexts '64,64' must be different",
    "speed --rounds 0": "--rounds '0' must be a whole number from 1 up",
    "speed --decode-tokens 3": "--decode-tokens '3' must be a whole number from 4 up",
    "mismatch --seed=-1": "--seed '-1' must be a whole number from 0 up",
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
