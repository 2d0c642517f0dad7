"""Tables at 80 columns, at 200, and without a terminal: whole names, whole figures, alike rows folded."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.text import Text

from qarl.quant.types import LayerReport
from qarl.report.audit_table import audit_table
from qarl.report.tables import PlainTable
from qarl.sync.audit import AuditRow


def drawn(table: PlainTable, columns: int, terminal: bool) -> list[str]:
    console = Console(width=columns, force_terminal=terminal, color_system=None)
    with console.capture() as captured:
        table.show(console)
    return captured.get().splitlines()


def audited(name: str, scheme: str = "w4a16", engine_kernel: str = "CPUWNA16LinearKernel") -> AuditRow:
    group = 128 if scheme == "w4a16" else None
    learner, engine = (
        LayerReport(name, scheme, group, "torch.bfloat16", kernel) for kernel in ("CPUWNA16LinearKernel", engine_kernel)
    )
    return AuditRow(name, learner, engine, "")


def large_model() -> list[AuditRow]:
    parts = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj"]
    rows = [
        audited(f"model.layers.{i}.{part}", "bf16" if part == "mlp.down_proj" and i in (0, 1, 27) else "w4a16")
        for i in range(28)
        for part in parts
    ]
    experts = [audited(f"model.layers.{i}.mlp.experts.{e}.up_proj") for i in range(28) for e in range(3)]
    return [*rows, *experts, audited("lm_head", "bf16")]


@pytest.mark.parametrize(("columns", "terminal"), [(200, True), (80, False), (20, False)])
def test_the_audit_has_a_line_for_layers_that_are_alike(columns: int, terminal: bool):
    lines = [line.split("  ") for line in drawn(audit_table(large_model()), columns, terminal)[2:]]
    cells = [[cell.strip() for cell in line if cell] for line in lines]
    same = ["bfloat16", "CPUWNA16LinearKernel"]
    assert cells == [
        ["0-27", "q_proj, k_proj, o_proj, gate_proj", "112", "w4a16", "128", *same],
        ["0-1, 27", "down_proj", "3", "bf16", "-", *same],
        ["2-26", "down_proj", "25", "w4a16", "128", *same],
        ["0-27", "experts.*.up_proj", "84", "w4a16", "128", *same],
        ["-", "lm_head", "1", "bf16", "-", *same],
    ]


def test_kernels_that_differ_have_a_column_each():
    lines = drawn(audit_table([audited("lm_head", engine_kernel="MarlinLinearKernel")]), 200, True)
    assert lines[-1].split()[-2:] == ["CPUWNA16LinearKernel", "MarlinLinearKernel"]


_CELLS = st.text("abcde [/]…×", max_size=40).map(str.strip)


@given(st.lists(st.tuples(_CELLS, _CELLS, st.floats(0, 1e9)), min_size=1, max_size=5), st.integers(5, 120))
def test_no_word_is_cut_and_no_line_longer_than_it_must(rows: list[tuple[str, str, float]], columns: int):
    table = PlainTable("a name", "some words", "a figure", figures=["a figure"], title="what it shows")
    for name, words, figure in rows:
        table.add_row(name, Text(words, style="red"), f"{figure:.3e}")
    lines = drawn(table, columns, True)
    words = {word for row in rows for cell in row[:2] for word in cell.split()} | {f"{row[2]:.3e}" for row in rows}
    assert words <= set(" ".join(lines).split())
    longest = max(map(len, words))
    assert max(map(len, lines)) <= max(columns, longest + len("some words") + 2)
    assert len(drawn(table, columns, False)) == 2 + len(rows), "without a terminal: a line a row"
