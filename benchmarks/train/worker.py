"""QaRL's side of `python -m benchmarks train`: one `qarl train` on a clock without evaluations.

python -m benchmarks.train.worker '{"model": "tiny-qwen3", …}'     (a run's configuration)
"""

import json
import sys
from collections.abc import Sequence

from benchmarks.train.clock import Clock
from benchmarks.train.job import Curve
from qarl.bench.process import answer_line


def run(tree: dict) -> Curve:
    """Train with the configuration `tree`, whose `output` must be a new folder.

    The benchmark's process provides the environment, set as `qarl train` sets its own.
    """
    from rich.console import Console

    from qarl.configs.load import config_from_tree
    from qarl.evaluation.heldout import Heldout
    from qarl.loop import train
    from qarl.report.dashboard import Dashboard
    from qarl.report.early_warning import EarlyWarning
    from qarl.report.metrics import StepMetrics
    from qarl.report.run_folder import RunFolder
    from qarl.start import RunStart

    config = config_from_tree(tree)
    clock = Clock(config.rollout.prompts * config.rollout.samples)

    class Clocked(Dashboard):
        def entered(self, phase: str) -> None:
            super().entered(phase)
            if phase == "sample":
                clock.begin()
            if phase == "evaluate":
                clock.evaluate()

        def baseline(self, measured: Heldout) -> None:
            super().baseline(measured)
            clock.evaluated(0, measured.accuracy)

        def stepped(self, metrics: StepMetrics, warnings: Sequence[EarlyWarning] = ()) -> None:
            super().stepped(metrics, warnings)
            if metrics.heldout is not None:
                clock.evaluated(metrics.step, metrics.heldout.accuracy)

    with Clocked(config, Console(file=sys.stderr)) as dashboard:
        train(RunStart(config, RunFolder.create(config)), dashboard)
    return clock.curve()


if __name__ == "__main__":
    sys.stdout.write(answer_line(run(json.loads(sys.argv[1]))))
