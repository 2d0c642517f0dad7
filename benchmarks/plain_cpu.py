"""`PYTHON -P benchmarks/plain_cpu.py CPU FOLDER FILE`: vLLM without QaRL on a kind of CPU.

PYTHON has vLLM. It scores drawn prompts of an exported folder, and FILE gets their log-probs. If
FILE has those of another call, the difference is printed. QaRL's own are made by its
environment's Python with QARL_SETTLES_VLLM=1.

CPU is this one ("native"), or vLLM is told that it lacks AMX ("avx512"), or AVX-512 as well
("avx2"). vLLM then takes the kernels that it has for such CPUs; oneDNN's products stay those of
this CPU.

A folder of a scheme: python -c 'import qarl; qarl.align("tiny-qwen3", "w4a16").export("FOLDER")'
"""

import json
import os
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

LACKS = {
    "native": (),
    "avx512": ("amx_tile",),
    "avx2": ("amx_tile", "avx512", "avx512_bf16", "vnni"),
}
"""Kind of CPU → what torch is to say that it lacks."""


def scored(folder: str) -> list[float]:
    """Return the log-probs of the tokens of four drawn prompts."""
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


def main() -> None:
    """Score, compare with what the file has, and write it if it is new."""
    cpu, folder, name = sys.argv[1:]
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import torch

    for feature in LACKS[cpu]:
        setattr(torch.cpu, f"_is_{feature}_supported", lambda: False)
    own = scored(folder)
    file = Path(name)
    if not file.is_file():
        file.write_text(json.dumps(own))
        return
    moved = [abs(a - b) for a, b in zip(own, json.loads(file.read_text()), strict=True)]
    text = f"{len(moved)} tokens, |Δ log p| {fmean(moved):.3g}, at most {max(moved):.3g} nats\n"
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
