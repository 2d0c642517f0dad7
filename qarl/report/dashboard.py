"""The display of a running run: a live panel in a terminal, plain lines elsewhere."""

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from statistics import fmean

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from qarl.configs.schema.run import RunConfig
from qarl.evaluation.heldout import Heldout
from qarl.report.early_warning import EarlyWarning
from qarl.report.metrics import StepMetrics
from qarl.report.start_note import audit_table
from qarl.sync.audit import AuditRow

_SPARKS = "▁▂▃▄▅▆▇█"
_DONE = "done"
_WIDTH = 48


class Dashboard(AbstractContextManager["Dashboard"]):
    """Display of one run. Use it as a context manager around `train`."""

    def __init__(self, config: RunConfig, console: Console):
        self._config = config
        self._console = console
        self._started = self._phase_started = time.monotonic()
        self._phase = "starting"
        self._steps: list[StepMetrics] = []
        self._heldout: list[tuple[int, Heldout]] = []
        # A thread of its own redraws the panel, so that times go on while a step runs. It never
        # starts without a terminal.
        self._live = Live(console=console, refresh_per_second=2, get_renderable=self.panel)

    def __exit__(self, *error: object) -> None:
        self.finished()

    def finished(self) -> None:
        """Stop the panel after the last step; later output is printed below it."""
        self.entered(_DONE)
        self._live.stop()

    def entered(self, phase: str) -> None:
        """Show that a phase of a step begins.

        Phases are "sample", "score", "learn", "publish", "record" and "evaluate". The first call
        starts the live panel, below the output of start-up.
        """
        self._phase = phase
        self._phase_started = time.monotonic()
        if self._console.is_terminal and not self._live.is_started and phase != _DONE:
            self._live.start()

    def audited(
        self,
        rows: list[AuditRow],
        materializers: dict[str, str],
        packed: bool,
        trained: list[str],
    ) -> None:
        """Print the audit table and the facts that the audit established.

        Args:
            rows: layers that the audit compared.
            materializers: scheme → the implementation that quantizes it.
            packed: whether the learner packs its sequences.
            trained: lines of `describe_training` and of `Connection.describe`.
        """
        audit_table(rows).show(self._console)
        implementations = (f"{scheme} by {name}" for scheme, name in materializers.items())
        materialized = ", ".join(implementations)
        self._console.print(f"materialized: {materialized}", soft_wrap=True, markup=False)
        self._console.print(f"learner's sequences: {'packed' if packed else 'padded'}")
        for line in trained:
            self._console.print(line, soft_wrap=True, markup=False)

    def baseline(self, measured: Heldout) -> None:
        """Print the held-out measurement before step 1."""
        self._heldout.append((0, measured))
        self._console.print(f"before training: held-out {measured.name} {measured.figure}")

    def stepped(self, metrics: StepMetrics, warnings: Sequence[EarlyWarning] = ()) -> None:
        """Show one step's metrics, and print the warnings that it gave.

        Without a terminal about 20 steps of a run are printed, and those with an evaluation.
        """
        self._steps.append(metrics)
        measured = metrics.heldout
        if measured is not None:
            self._heldout.append((metrics.step, measured))
        due = metrics.step == 1 or metrics.step % max(1, self._config.steps // 20) == 0
        if metrics.step == self._config.steps:
            self.finished()
        if not self._console.is_terminal and (due or measured is not None):
            self._console.print(self._line(metrics), soft_wrap=True)
        for warning in warnings:
            self._console.print(
                f"[yellow]warning[/], step {warning.step}: {escape(warning.text)}",
                soft_wrap=True,
            )

    def panel(self) -> RenderableType:
        """Return the live panel."""
        config = self._config
        done = self._steps[-1].step if self._steps else 0
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="bold")
        grid.add_column()
        bar = ProgressBar(total=config.steps, completed=done, width=_WIDTH)
        grid.add_row("step", Group(Text(f"{done} / {config.steps}   {self._times(done)}"), bar))
        if self._phase != _DONE:
            grid.add_row(
                "now",
                f"{self._phase} [dim]for {time.monotonic() - self._phase_started:.0f} s[/]",
            )
        if self._steps:
            self._add_measured(grid, self._steps)
        title = f"[bold]QaRL[/]  {escape(config.model)}  {config.scheme}  {config.dtype}"
        return Panel(grid, title=title, border_style="cyan", expand=False)

    def _add_measured(self, grid: Table, steps: Sequence[StepMetrics]) -> None:
        """Add the rows that are known after the first step."""
        last = steps[-1]
        rewards = [m.reward for m in steps]
        phases = dict.fromkeys(phase for m in steps for phase in m.seconds)
        seconds = {phase: sum(m.seconds.get(phase, 0.0) for m in steps) for phase in phases}
        tokens = self._config.rollout.samples * sum(m.response_tokens * m.prompts for m in steps)
        grid.add_row("reward", f"[green]{sparkline(rewards)}[/]")
        scale = f"[dim]scale {min(rewards):.3f} … {max(rewards):.3f}[/]"
        grid.add_row("", f"{fmean(rewards[-10:]):.3f} of the last 10 steps   {scale}")
        if self._heldout:
            grid.add_row(
                "held-out",
                "  ".join(f"{each} [dim]@{step}[/]" for step, each in self._heldout[-6:]),
            )
        rate = tokens / max(seconds.get("sample", 0), 1e-9)
        grid.add_row(
            "completions",
            f"{last.response_tokens:,.1f} tokens   truncated {last.truncated:.1%}   "
            f"sampled at {rate:,.0f} tokens/s",
        )
        if last.learn:
            m = last.learn.mismatch
            grid.add_row(
                "mismatch",
                f"mean |Δ log p| {m.mean_abs:.2e}   max {m.max_abs:.2e} nats   {m.equal:.1%} equal",
            )
            grid.add_row(
                "update",
                f"lr {last.learn.lr:.1e}   gradient norm {last.learn.grad_norm:.3f}   "
                f"clipped {last.learn.clipped:.1%} of tokens",
            )
            grid.add_row("entropy", f"{last.learn.entropy:.3f} nats a token")
        total = sum(seconds.values()) or 1.0
        grid.add_row(
            "time",
            "   ".join(f"{phase} {seconds[phase] / total:.0%}" for phase in phases),
        )

    def _times(self, done: int) -> str:
        """Return the elapsed time, the seconds a step, and the estimated time left."""
        elapsed = f"{_hours(time.monotonic() - self._started)} elapsed"
        if not self._steps:
            return elapsed
        pace = self._pace()
        left = _hours(pace * (self._config.steps - done))
        return f"{elapsed}   {pace:.2f} s/step   ETA {left}"

    def _pace(self) -> float:
        """Return the mean seconds of the last steps.

        At least as many steps count as lie between evaluations, so that these have their share.
        """
        last = self._steps[-max(10, self._config.eval.every) :]
        return fmean(sum(m.seconds.values()) for m in last)

    def _line(self, m: StepMetrics) -> str:
        """Return one step as a line."""
        measured = m.heldout
        held_out = f"  held-out {measured}" if measured else ""
        mismatch = "  skipped (all rewards equal)"
        if m.learn:
            mismatch = f"  |Δ log p| {m.learn.mismatch.mean_abs:.2e}"
        left = _hours(self._pace() * (self._config.steps - m.step))
        times = f"  {sum(m.seconds.values()):.2f} s  ETA {left}"
        step = (
            f"step {m.step:>4}/{self._config.steps}  reward {m.reward:.3f} "
            f" {m.response_tokens:,.1f} tokens"
        )
        return f"{step}{mismatch}{times}{held_out}"


def _hours(seconds: float) -> str:
    """Format seconds: 75.2 → 1:15, 3675 → 1:01:15."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def sparkline(values: list[float]) -> str:
    """Draw values as one line of bars, whose heights range from the smallest value to the largest.

    Values are averaged into at most `_WIDTH` bars.
    """
    if not values:
        return ""
    bins = min(_WIDTH, len(values))
    edges = [round(i * len(values) / bins) for i in range(bins + 1)]
    slices = [values[begin:end] for begin, end in pairwise(edges)]
    means = [sum(each) / len(each) for each in slices]
    low = min(values)
    span = max(max(values) - low, 1e-9)
    heights = [min(7, int(8 * (mean - low) / span)) for mean in means]
    return "".join(_SPARKS[height] for height in heights)
