"""What a person sees while a run goes on: a live panel in a terminal, plain lines elsewhere."""

from itertools import pairwise
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from configs.schema.run import RunConfig
from learner.learner import LearnStats
from qarl.report.audit_table import audit_table
from qarl.report.metrics import StepMetrics
from sync.audit import AuditRow

_SPARKS = "▁▂▃▄▅▆▇█"
_PHASE_COLORS = {
    "sample": "cyan",
    "score": "green",
    "learn": "magenta",
    "publish": "yellow",
    "evaluate": "blue",
}
_WIDTH = 48


class Dashboard:
    """Shows a run. Use as a context manager around `train`."""

    def __init__(self, config: RunConfig, console: Console):
        self._config = config
        self._console = console
        self._rewards: list[float] = []
        self._accuracies: list[tuple[int, float]] = []
        self._seconds: dict[str, float] = {}
        self._tokens = 0.0
        self._last: StepMetrics | None = None
        self._kernels = ""
        self._diagnosed = ""
        self._live = Live(console=console, refresh_per_second=4) if console.is_terminal else None

    def __enter__(self) -> "Dashboard":
        if self._live:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        if self._live:
            self._live.stop()

    def audited(self, rows: list[AuditRow], materializers: dict[str, str], packed: bool, trained: list[str]) -> None:
        """Print the audit table, one line for layers that are alike, what materializes each scheme, whether the
        learner packs its sequences, and what `trained_part` has to say."""
        self._kernels = ", ".join(sorted({r.learner.kernel for r in rows if r.learner}))
        audit_table(rows).show(self._console)
        made = ", ".join(f"{scheme} by {how}" for scheme, how in materializers.items())
        self._console.print(f"materialized: {made}", soft_wrap=True, markup=False)
        self._console.print(f"learner's sequences: {'packed' if packed else 'padded'}")
        for line in trained:
            self._console.print(line, soft_wrap=True, markup=False)

    def baseline(self, accuracy: float) -> None:
        """Held-out accuracy before step 1."""
        self._accuracies.append((0, accuracy))
        self._console.print(f"before training: held-out accuracy {accuracy:.1%}")

    def stepped(self, metrics: StepMetrics) -> None:
        """Take in one step's metrics."""
        self._last = metrics
        self._rewards.append(metrics.reward)
        if metrics.accuracy is not None:
            self._accuracies.append((metrics.step, metrics.accuracy))
        for phase, seconds in metrics.seconds.items():
            self._seconds[phase] = self._seconds.get(phase, 0.0) + seconds
        if metrics.learn and metrics.learn.lost_updates is not None:
            self._diagnosed = f"{_diagnosis(metrics.learn)}   [dim]@{metrics.step}[/]"
        self._tokens += metrics.response_tokens * metrics.prompts * self._config.rollout.samples
        if self._live:
            self._live.update(self.panel())
        elif metrics.accuracy is not None or metrics.step % max(1, self._config.steps // 20) == 0:
            self._console.print(self._line(metrics), soft_wrap=True)

    def panel(self) -> RenderableType:
        """The live view."""
        config, last = self._config, self._last
        assert last is not None
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="bold")
        grid.add_column()
        bar = ProgressBar(total=config.steps, completed=last.step, width=_WIDTH)
        grid.add_row("step", Group(Text(f"{last.step} / {config.steps}"), bar))
        recent = sum(self._rewards[-10:]) / len(self._rewards[-10:])
        grid.add_row("reward", f"[green]{sparkline(self._rewards)}[/]  {recent:.3f}")
        grid.add_row("held-out", "  ".join(f"{a:.1%} [dim]@{s}[/]" for s, a in self._accuracies[-6:]))
        if last.learn:
            m = last.learn.mismatch
            grid.add_row("mismatch", f"mean |Δ log p| {m.mean_abs:.2e}   k3 {m.k3:.1e}   max |Δ| {m.max_abs:.2e}")
            grid.add_row("update", f"grad {last.learn.grad_norm:.3f}   clipped {last.learn.clipped:.1%}   "
                                   f"entropy {last.learn.entropy:.3f} nats")  # fmt: skip
        if self._diagnosed:
            grid.add_row("precision", self._diagnosed)
        grid.add_row("sampling", f"{self._tokens / max(self._seconds.get('sample', 0), 1e-9):,.0f} tokens/s")
        grid.add_row("time", self._time_split())
        title = f"[bold]QaRL[/]  {config.model}  {config.scheme}  {config.dtype}"
        return Panel(grid, title=title, subtitle=f"[dim]{self._kernels}[/]", border_style="cyan", expand=False)

    def _time_split(self) -> Group:
        total = sum(self._seconds.values()) or 1.0
        bar, legend = Text(), Text()
        for phase, seconds in self._seconds.items():
            color = _PHASE_COLORS.get(phase, "white")
            bar.append("█" * round(_WIDTH * seconds / total), style=color)
            legend.append(f"{phase} {seconds / total:.0%}  ", style=color)
        return Group(bar, legend)

    def _line(self, m: StepMetrics) -> str:
        held_out = f"  held-out {m.accuracy:.1%}" if m.accuracy is not None else ""
        mismatch = f"  |Δ log p| {m.learn.mismatch.mean_abs:.2e}" if m.learn else "  skipped (all rewards equal)"
        diagnosed = f"  {_diagnosis(m.learn)}" if m.learn and m.learn.lost_updates is not None else ""
        rest = f"{diagnosed}  {sum(m.seconds.values()):.2f} s{held_out}"
        return f"step {m.step:>4}/{self._config.steps}  reward {m.reward:.3f}{mismatch}{rest}"


def _diagnosis(learn: LearnStats) -> str:
    """What a step measured of `learner.lost_updates`, in words."""
    flipped = "" if learn.flipped_codes is None else f"   flipped codes {learn.flipped_codes:.2%}"
    return f"lost updates {learn.lost_updates:.1%}{flipped}"


def sparkline(values: list[float], width: int = _WIDTH) -> str:
    """Values as one line of bars, averaged into at most `width` bins, scaled from 0 to the largest."""
    if not values:
        return ""
    bins = min(width, len(values))
    edges = [round(i * len(values) / bins) for i in range(bins + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    top = max(max(means), 1e-9)
    return "".join(_SPARKS[min(7, int(8 * max(0.0, m) / top))] for m in means)
