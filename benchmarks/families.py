"""Agreement of learner and sampler on tiny random models of many families.

python -m benchmarks.families [NAME …] [--schemes w4a16,w8a8] [--dtype bfloat16] [--json FILE]
python -m benchmarks.families --commands [NAME …]     what the commands do, `family_commands`

With `--commands` a FILE of `--json` is written after every family, and families that it already
has in this scheme and dtype are not run again. So a table of hours can be made in parts.

For each family and scheme vLLM starts on the exported codes, is audited, takes another version of
them, and samples. Three things are measured:

- the fraction of sampled tokens whose log-prob the learner reproduces to the last bit;
- over all masters' gradients of a policy-gradient loss, the cosine with and the relative error to
  transformers' gradients in float32 on the dequantized weights. That reference has no low-bit
  activations, so for schemes that have them the error is an upper bound;
- whether every master gets a gradient;
- the mean |Δ log p| of vLLM's operators and transformers' in float32, and its bound
  (`quant.model.operator_check`). A run of a family beyond the bound is refused.
"""

import argparse
import copy
import json
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch

from benchmarks.family_commands import print_row, registered, table, through_commands
from benchmarks.family_models import FAMILIES, write_model
from qarl.cli.options import json_file, write_json
from qarl.configs.schema.rollout import RolloutConfig
from qarl.learner.batching import Batch, make_batch
from qarl.learner.logprobs import token_logprobs
from qarl.learner.mismatch import measure_mismatch
from qarl.mismatch.investigate import engine_of
from qarl.quant.checkpoint.load import load_masters
from qarl.quant.layers.context import LayerContext
from qarl.quant.model.low_bit_model import LowBitModel
from qarl.quant.model.operator_check import check_operators
from qarl.quant.schemes import COMPUTE_DTYPES, get_scheme
from qarl.report.record import record
from qarl.rollout.types import Group, Prompt, Sampling
from qarl.sync.audit import audit, require_agreement
from qarl.sync.publisher import Publisher


def measure(
    name: str,
    scheme: str,
    dtype: str,
    samples: int,
    tokens: int,
) -> dict[str, Any]:
    """Measure one family in one scheme and return its row."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_model(name, folder)
        masters = load_masters(folder, torch.float32)
        reference = copy.deepcopy(masters)
        context = LayerContext(COMPUTE_DTYPES[dtype], "auto")
        model = LowBitModel(masters, get_scheme(scheme), context, "engine")
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randint(16, 500, (samples, 16), generator=generator).tolist()
        prompts = [Prompt(str(n), "", tuple(row)) for n, row in enumerate(drawn)]
        operators = check_operators(model, drawn)
        assert operators is not None
        rollout = RolloutConfig(max_prompt_tokens=16, max_new_tokens=tokens)
        with engine_of(model, folder, rollout, dtype) as engine:
            publish_another(model, engine, drawn)
            completions = engine.generate(prompts, Sampling(1, tokens, seed=0))
            pairs = zip(prompts, completions, strict=True)
            groups = [Group(prompt, tuple(answers), (1.0,)) for prompt, answers in pairs]
            batch = make_batch(groups, pad_token=0)
            model.multiply_with(engine.shared_layers())
            with torch.no_grad():
                shared = _scores(model, batch)
            model.multiply_with(None)
        with torch.no_grad():
            scores = _scores(model, batch)
        by_learner = measure_mismatch(scores, batch.sampler_logprobs, batch.response_mask)
        by_engine = measure_mismatch(shared, batch.sampler_logprobs, batch.response_mask)
        gradients = _gradients(model, batch)
        trained = [n for n, master in model.masters.items() if master.requires_grad]
        missing = [n for n in trained if n not in gradients or not gradients[n].any()]
        expected, plain = _reference(model, reference, batch)
        cosine, error = compare(gradients, expected)
        return {
            "family": name,
            "scheme": scheme,
            "dtype": dtype,
            "equal": by_engine.equal,
            "equal_own": by_learner.equal,
            "mean_abs": by_engine.mean_abs,
            "reference": plain,
            "operators": operators.difference,
            "operators_bound": operators.bound,
            "cosine": cosine,
            "relative": error,
            "unreached": missing[:4],
        }


def publish_another(model: LowBitModel, engine: Any, sequences: list[list[int]]) -> None:
    """Audit the engine, move all masters a little, and publish them."""
    require_agreement(audit(model.layer_reports(), engine.layer_reports(), same_kernels=True))
    with torch.no_grad():
        for master in (master for master in model.masters.values() if master.requires_grad):
            master.add_(0.1 * master.abs().mean() * torch.randn_like(master))
    model.refresh()
    Publisher(model, engine, sequences, bound=float("inf"), canary_every=1).publish(1)


def _scores(model: Any, batch: Batch) -> torch.Tensor:
    return token_logprobs(
        model, batch.tokens, batch.response_mask, packed=batch.packed(), entropy=False
    )[0]


def weights_of_loss(batch: Batch) -> torch.Tensor:
    """Return the weight of each sampled token's log-prob in the loss, fp32 [B, T-1]."""
    return (
        torch.linspace(-1, 1, batch.response_mask.numel()).view_as(batch.response_mask)
        * batch.response_mask
    )


def _gradients(model: LowBitModel, batch: Batch) -> dict[str, torch.Tensor]:
    (_scores(model, batch) * weights_of_loss(batch)).sum().backward()
    return {n: p.grad for n, p in model.masters.items() if p.grad is not None}


def dequantized_masters(model: LowBitModel) -> dict[int, torch.Tensor]:
    """Return the weights that the codes stand for, by the identity (`id`) of their master."""
    values = {id(layer.master): layer.weight_used() for layer in model.linears.values()}
    for experts in model.experts.values():
        stacks = experts.stacks_used(torch.float32)
        if experts.shape.layout.transposed:
            stacks = tuple(stack.transpose(1, 2) for stack in stacks)
        values |= dict(zip(map(id, experts.masters), stacks, strict=True))
    return values


def _reference(
    model: LowBitModel, reference: Any, batch: Batch
) -> tuple[dict[str, torch.Tensor], float]:
    """Return transformers' float32 gradients on the dequantized weights.

    The second value is the mean |Δ log p| between this reference and the sampler.
    """
    values = dequantized_masters(model)
    names = {name: values.get(id(parameter)) for name, parameter in model.loaded.items()}
    parameters = dict(reference.named_parameters())
    with torch.no_grad():
        for name, value in names.items():
            parameters[name].copy_(model.loaded[name].to(model.dtype) if value is None else value)
    logits = reference(input_ids=batch.tokens, use_cache=False).logits[:, :-1].float()
    next_tokens = batch.tokens[:, 1:, None]
    logp = logits.log_softmax(-1).gather(-1, next_tokens)[..., 0]
    (logp * weights_of_loss(batch)).sum().backward()
    off = measure_mismatch(
        logp.detach() * batch.response_mask, batch.sampler_logprobs, batch.response_mask
    ).mean_abs
    gradients = {n: p.grad for n, p in parameters.items() if p.grad is not None}
    return gradients, off


def compare(
    ours: dict[str, torch.Tensor],
    theirs: dict[str, torch.Tensor],
) -> tuple[float, float]:
    """Return the cosine of all gradients with a reference, and their relative error."""
    names = [name for name in theirs if name in ours]
    a = torch.cat([ours[name].double().flatten() for name in names])
    b = torch.cat([theirs[name].double().flatten() for name in names])
    cosine = a @ b / (a.norm() * b.norm())
    relative_error = (a - b).norm() / b.norm()
    return float(cosine), float(relative_error)


def _through_commands(
    names: list[str], scheme: str, dtype: str, file: str | None
) -> list[dict[str, Any]]:
    """Print and return a row of each family, or of every architecture that vLLM registers.

    file: record that is written after each row, and whose rows are not measured again.
    """
    os.environ["OMP_NUM_THREADS"] = "1"  # forks inherit no threads
    rows = _rows_of(file, scheme, dtype)
    classes = registered()
    others = sorted({*classes.values()} - {kind for kind, _ in FAMILIES.values()} - {""})
    done = {row["family"] for row in rows}
    tiny = [name for name in FAMILIES if not name.endswith("-wide")]
    for name in names or [*tiny, *others]:
        if name in done:
            continue
        row: dict[str, Any] = {"family": name, "scheme": scheme, "dtype": dtype}
        with tempfile.TemporaryDirectory() as folder:
            try:
                write_model(name, Path(folder))
            # a class has settings that belong together
            except Exception as error:
                row |= {"outcome": "not made", "reason": f"{type(error).__name__}: {error}"}
            else:
                row |= through_commands(name, Path(folder), scheme, dtype)
                row = {
                    key: text.replace(folder, name) if isinstance(text, str) else text
                    for key, text in row.items()
                }
        rows.append(row)
        print_row(row)
        _write(file, rows)
    if not names:
        rows += [
            {
                "family": name,
                "scheme": scheme,
                "dtype": dtype,
                "outcome": "refused",
                "reason": "transformers has no such class",
            }
            for name, kind in classes.items()
            if not kind and name not in done
        ]
        _write(file, rows)
    table(rows)
    return rows


def _rows_of(file: str | None, scheme: str, dtype: str) -> list[dict[str, Any]]:
    """Return the rows of a record that are in this scheme and dtype; [] if there is none."""
    if file is None or not Path(file).is_file():
        return []
    rows = json.loads(Path(file).read_text(encoding="utf-8"))["data"]
    return [row for row in rows if (row["scheme"], row["dtype"]) == (scheme, dtype)]


def _write(file: str | None, rows: list[dict[str, Any]]) -> None:
    """Write the record of these rows, unless `file` is None."""
    write_json(file, record(sys.argv[1:], rows, "python -m benchmarks.families"))


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--schemes", default="bf16,w4a16,w8a8")
    parser.add_argument("--dtype", default="bfloat16", choices=tuple(COMPUTE_DTYPES))
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--json", type=json_file, metavar="FILE", help="write the rows as a record")
    parser.add_argument(
        "--commands",
        action="store_true",
        help="go through schemes, check and train instead, with the first of --schemes; without"
        " NAME every text architecture that vLLM registers",
    )
    parser.add_argument("--trace", action="store_true", help="print tracebacks of refusals")
    options = parser.parse_args()
    if options.commands:
        scheme = options.schemes.split(",")[0]
        _through_commands(options.names, scheme, options.dtype, options.json)
        return 0
    rows = []
    for name in options.names or FAMILIES:
        for scheme in options.schemes.split(","):
            try:
                row = measure(name, scheme, options.dtype, options.samples, options.tokens)
                beyond = "beyond the bound" if row["operators"] > row["operators_bound"] else ""
                text = (
                    f"equal {row['equal']:.3f} own {row['equal_own']:.3f} ref"
                    f" {row['reference']:.3f} fp32 {row['operators']:.1e} {beyond} cos"
                    f" {row['cosine']:.4f} rel {row['relative']:.3f} {row['unreached'] or ''}"
                )
            except Exception as error:
                row = {
                    "family": name,
                    "scheme": scheme,
                    "refused": f"{type(error).__name__}: {error}",
                }
                text = row["refused"][:300]
                if options.trace:
                    traceback.print_exc()
            rows.append(row)
            print(f"{name:20} {scheme:8} {text}", flush=True)
            if "refused" in row:
                break
    _write(options.json, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
