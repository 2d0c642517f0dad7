"""Compare vLLM without QaRL on kinds of CPU with QaRL's engine, on the same exported folder.

    python -m benchmarks.plain_cpu --plain PYTHON [--schemes w4a16,w8a8] [--json FILE]

PYTHON has vLLM and cannot import QaRL. Each scheme is exported from tiny-qwen3 and from
tiny-qwen3-moe. QaRL's engine and vLLM alone then score the same 160 drawn prompt tokens, each in a
process of its own.

A kind of CPU is this one ("native"), or this one told to vLLM as one without AMX ("no amx"), or
without AVX-512 as well ("no avx512"). vLLM then takes the kernels that it has for such CPUs;
oneDNN's products stay those of this CPU. Kinds that this CPU is of already are left out.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

LACKS = {
    "native": (),
    "no amx": ("amx_tile",),
    "no avx512": ("amx_tile", "avx512", "avx512_bf16", "vnni"),
}
"""Kind of CPU → what torch is to say that it lacks."""
MODELS = ("tiny-qwen3", "tiny-qwen3-moe")
SCHEMES = ("bf16", "w4a16", "w4a8", "w8a8", "fp8")
_TIMEOUT = 300
"""Seconds that one engine may take to start and to score."""


def kinds() -> list[str]:
    """Return the kinds of CPU that differ on this machine."""
    import torch

    one: Any = torch.cpu
    remaining = ["native"]
    if one._is_amx_tile_supported():
        remaining.append("no amx")
    if one._is_avx512_supported():
        remaining.append("no avx512")
    return remaining


def scored(folder: str) -> list[float]:
    """Return the log-probs of the tokens of four drawn prompts of 40, in nats.

    The first token of a prompt has none, so that there are 156.
    """
    import torch
    from vllm import LLM, SamplingParams

    llm = LLM(
        folder,
        dtype="bfloat16",
        enforce_eager=True,
        kv_cache_memory_bytes=2**28,
        gpu_memory_utilization=0.1,
        max_model_len=128,
        max_num_seqs=4,
        distributed_executor_backend="uni",
    )
    generator = torch.Generator().manual_seed(0)
    prompts: Any = [
        {"prompt_token_ids": torch.randint(5, 60, (40,), generator=generator).tolist()}
        for _ in range(4)
    ]
    parameters = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    results = llm.generate(prompts, parameters, use_tqdm=False)
    tokens = [token for each in results for token in (each.prompt_logprobs or [])[1:]]
    return [entry.logprob for token in tokens if token for entry in token.values()]


def score_here(kind: str, folder: str, file: str) -> None:
    """Score a folder in this process, which is told of a kind of CPU, and write the log-probs."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import torch

    for feature in LACKS[kind]:
        setattr(torch.cpu, f"_is_{feature}_supported", lambda: False)
    Path(file).write_text(json.dumps(scored(folder)))


def score(python: Path, kind: str, folder: Path, own: bool) -> list[float] | str:
    """Score a folder in a process of `python`. Return the log-probs, or the error that ended it.

    own: whether the engine is QaRL's, with its kernels and its settings of vLLM.
    """
    file = folder.parent / "scores.json"
    file.unlink(missing_ok=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if own:
        environment |= {"QARL_SETTLES_VLLM": "1", "VLLM_CPU_ATTN_SPLIT_KV": "0"}
        environment["PYTHONPATH"] = str(Path(__file__).resolve().parents[1])
    command = [str(python), "-P", __file__, "--score", kind, str(folder), str(file)]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=_TIMEOUT
        )
    except subprocess.TimeoutExpired:
        return f"no answer in {_TIMEOUT} s"
    if file.is_file() and done.returncode == 0:
        return json.loads(file.read_text())
    if done.returncode < 0:
        return f"signal {-done.returncode}"  # 4 is an illegal instruction
    errors = [text for text in done.stderr.splitlines() if "Error:" in text]
    return errors[-1].split("Error:", 1)[1].strip()[:160] if errors else f"exit {done.returncode}"


def exported(model: str, scheme: str, folder: Path) -> None:
    """Export a scheme of an embedded policy in a process of its own."""
    code = "import sys, qarl; qarl.align(*sys.argv[1:3]).export(sys.argv[3])"
    command = [sys.executable, "-c", code, model, scheme, str(folder)]
    subprocess.run(command, check=True, capture_output=True)


def measure(model: str, scheme: str, plain: Path, work: Path) -> dict[str, Any]:
    """Return one row: what vLLM alone moves of QaRL's log-probs, on each kind of CPU."""
    folder = work / f"{model}-{scheme}"
    exported(model, scheme, folder)
    own = score(Path(sys.executable), "native", folder, own=True)
    if isinstance(own, str):
        raise SystemExit(f"QaRL's engine does not score {scheme} of {model}: {own}")
    row: dict[str, Any] = {"model": model, "scheme": scheme, "kinds": {}}
    for kind in kinds():
        other = score(plain, kind, folder, own=False)
        if isinstance(other, str):
            row["kinds"][kind] = {"error": other}
            continue
        moved = [abs(a - b) for a, b in zip(own, other, strict=True)]
        row["kinds"][kind] = {"tokens": len(moved), "mean": fmean(moved), "max": max(moved)}
    shutil.rmtree(folder)
    return row


def main() -> None:
    """Measure every scheme of both models, and print and save the rows."""
    if sys.argv[1:2] == ["--score"]:  # the inner call, by a Python that cannot import QaRL
        score_here(*sys.argv[2:5])
        return
    from benchmarks.served import require_alone
    from qarl.cli.options import write_json
    from qarl.report.record import record

    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.plain_cpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--plain", type=Path, required=True, help="a Python without QaRL")
    parser.add_argument("--schemes", default=",".join(SCHEMES), help="schemes, with commas between")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record here")
    arguments = parser.parse_args()
    require_alone(arguments.plain)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="qarl-plain-") as work:
        for model in MODELS:
            for scheme in arguments.schemes.split(","):
                rows.append(measure(model, scheme, arguments.plain, Path(work)))
                print(json.dumps(rows[-1], ensure_ascii=False), flush=True)
    if arguments.json:
        program = "python -m benchmarks.plain_cpu"
        write_json(str(arguments.json), record(sys.argv[1:], rows, program))


if __name__ == "__main__":
    main()
