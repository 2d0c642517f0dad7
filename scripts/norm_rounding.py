"""How often vLLM's CUDA norms round, counted in the wheel's own machine code: no GPU is needed.

    python scripts/norm_rounding.py [--vllm WHEEL_OR_LIBRARY] [--tools FOLDER] [--arch sm_90]

`quant/operators/rounding.py` says of bfloat16 that the sum of residual and branch is rounded before its norm (packed
additions, HADD2.BF16 and HFMA2.MMA.BF16), and that a norm is rounded once, after the weight (F2FP.BF16, two values
each). A kernel that handles V values at a time so has V/2 of each. Another count means that an upgrade rounds
otherwise. Exit status 1 then.

--vllm: default, the installed CUDA wheel's `_C_stable_libtorch.abi3.so`. --tools: with cuobjdump and nvdisasm; default,
those of the installed Triton.
"""

import argparse
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from pathlib import Path

_LIBRARY = "_C_stable_libtorch.abi3.so"
_KERNEL = re.compile(
    r"\S*?(?:25(?P<fused>fused_add)_rms_norm_kernel|15rms_norm_kernel)IN3c108BFloat16ELi(?P<width>\d+)E\S*"
)
_SUM = re.compile(r"\b(?:HADD2|HFMA2\.MMA)\.BF16\S*")
_ROUNDING = re.compile(r"\bF2FP\.BF16\S*")


def main() -> int:
    """Print a line a kernel."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=Path)
    parser.add_argument("--tools", type=Path)
    parser.add_argument("--arch", default="sm_90")
    known = parser.parse_args()
    tools = known.tools or _installed("triton", "backends/nvidia/bin")
    with tempfile.TemporaryDirectory() as place:
        library = known.vllm or _installed("vllm", _LIBRARY)
        if library.suffix == ".whl":
            library = Path(zipfile.ZipFile(library).extract(f"vllm/{_LIBRARY}", place))
        return _count(library, tools, known.arch)


def _count(library: Path, tools: Path, arch: str) -> int:
    kernels = dict.fromkeys(_KERNEL.finditer(_dump(tools, "--dump-elf-symbols", "-arch", arch, str(library))))
    names = {kernel[0]: kernel for kernel in kernels}
    if not names:
        raise SystemExit(f"{library} has no bfloat16 norms for {arch}")
    others, shown = 0, Counter[str]()
    for name, kernel in sorted(names.items()):
        width = int(kernel["width"])
        if not width:  # any width, a value at a time in a loop; taken for odd sizes alone
            continue
        code = _dump(tools, "-sass", "-arch", arch, "-fun", name, str(library))
        sums, roundings = len(_SUM.findall(code)), len(_ROUNDING.findall(code))
        expected = (width // 2 if kernel["fused"] else 0, max(1, width // 2))
        others += (sums, roundings) != expected
        kind = "fused_add_rms_norm" if kernel["fused"] else "rms_norm"
        found = f"{sums} packed additions, {roundings} of rounding"
        wrong = "" if (sums, roundings) == expected else f"; not {expected}"
        shown[f"{kind:20}{width:3} values: {found}{wrong}"] += 1
    for line, count in shown.items():
        print(f"{line}, in {count} kernels")
    print(f"{len(names)} kernels of {arch}, {others} round otherwise than quant/operators/rounding.py says")
    return int(others > 0)


def _dump(tools: Path, *options: str) -> str:
    environment = {**os.environ, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}  # cuobjdump calls nvdisasm
    return subprocess.run(
        [str(tools / "cuobjdump"), *options], capture_output=True, text=True, check=True, env=environment
    ).stdout


def _installed(package: str, path: str) -> Path:
    spec = importlib.util.find_spec(package)
    folder = Path(spec.origin).parent if spec and spec.origin else None
    if folder is None or not (folder / path).exists():
        raise SystemExit(f"{package} of the CUDA environment is not installed; name the file with an option")
    return folder / path


if __name__ == "__main__":
    sys.exit(main())
