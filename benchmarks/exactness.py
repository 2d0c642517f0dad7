"""`python -m benchmarks.exactness`: CPU cost of bits that depend only on a token's own past.

Two costs are measured: attention in short requests against whole sequences, and a row next to a row
of zeros against the row alone. Layers are single and hold random values. The fastest of several
interleaved repeats counts.
"""

import argparse
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from qarl.cli.environment import quiet_libraries
from qarl.cli.options import write_json
from qarl.report.record import record

ATTENTION = (
    (9, 3, 64, "bfloat16", 1500),
    (28, 4, 128, "bfloat16", 600),
    (12, 2, 128, "bfloat16", 257),
    (32, 8, 128, "bfloat16", 2000),
    (32, 8, 128, "float32", 2000),
)
"""Query heads, key-value heads, head size, dtype and number of tokens."""
PRODUCTS = ((576, 960), (576, 3072), (1536, 576), (576, 49152), (2048, 8192))
"""Input columns and output rows."""
REPEATS = 5


def quickest(
    calls: Mapping[str, Callable[[], object]],
) -> dict[str, float]:
    """Return each call's shortest time in milliseconds over `REPEATS` rounds."""
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(REPEATS):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            best[name] = min(best[name], 1e3 * (time.perf_counter() - start))
    return best


def attention_rows() -> list[dict[str, float | str]]:
    """Return a row for each of `ATTENTION`.

    A row has the milliseconds of whole sequences, and the time of short requests divided by that.
    """
    from qarl.quant.kernels import cpu_attention as attention
    from qarl.quant.kernels.base import Scoring
    from qarl.quant.runtime.replaced import replaced

    rows: list[dict[str, float | str]] = []
    for H, G, D, dtype, tokens in ATTENTION:
        values = (torch.randn(tokens, heads, D) for heads in (H, G, G))
        q, k, v = (drawn.to(getattr(torch, dtype)) for drawn in values)
        scoring = Scoring(scale=D**-0.5)

        def short(
            q=q,
            k=k,
            v=v,
            scoring=scoring,
            tokens=tokens,
        ) -> None:
            attention.cpu_attention(q, k, v, scoring, [tokens], [tokens])

        def whole(short: Callable[[], None] = short) -> None:
            with replaced(attention, queries_per_request=lambda *_: 1 << 20):
                short()

        milliseconds = quickest({"whole": whole, "short": short})
        layer = f"{H} heads ({G} of keys) of {D}, {dtype}, {tokens} tokens"
        rows.append(
            {
                "layer": layer,
                "ms": milliseconds["whole"],
                "ratio": milliseconds["short"] / milliseconds["whole"],
            }
        )
    return rows


def product_rows() -> list[dict[str, float | str]]:
    """Return a row for each of `PRODUCTS`.

    A row has the milliseconds of one row alone, and the time of a row next to zeros divided by
    that.
    """
    from vllm import _custom_ops as ops

    rows: list[dict[str, float | str]] = []
    for columns, outputs in PRODUCTS:
        handler = ops.create_onednn_mm(torch.randn(outputs, columns).bfloat16().t(), 32)
        x = torch.randn(1, columns).bfloat16()

        def alone(handler=handler, x=x) -> None:
            for _ in range(20):
                ops.onednn_mm(handler, x, None)

        def paired(handler=handler, x=x) -> None:
            for _ in range(20):
                ops.onednn_mm(handler, torch.nn.functional.pad(x, (0, 0, 0, 1)), None)[:1]

        milliseconds = quickest({"alone": alone, "paired": paired})
        layer = f"{columns:,} columns to {outputs:,}, bfloat16"
        rows.append(
            {
                "layer": layer,
                "ms": milliseconds["alone"] / 20,
                "ratio": milliseconds["paired"] / milliseconds["alone"],
            }
        )
    return rows


def main() -> None:
    """Print both tables, and write them as JSON if `--json` is set."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.exactness", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    quiet_libraries()
    figures = {
        "attention": attention_rows(),
        "one row": product_rows(),
        "threads": torch.get_num_threads(),
    }
    for name in ("attention", "one row"):
        for row in figures[name]:
            print(f"{name}: {row['layer']:48s} {row['ms']:8.2f} ms, x {row['ratio']:.2f}")
    if arguments.json:
        write_json(str(arguments.json), record([], figures, "python -m benchmarks.exactness"))


if __name__ == "__main__":
    main()
