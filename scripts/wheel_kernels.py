#!/usr/bin/env python3
"""List which kernels of a vLLM wheel for CUDA hold machine code for which GPU, without a GPU.

    python scripts/wheel_kernels.py WHEEL [--json FILE]

`qarl schemes` names the kernel that vLLM's Python chooses for a scheme. This script looks whether
the wheel has that kernel's code. It needs NVIDIA's `cuobjdump` and `nvdisasm` in PATH (the packages
nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm have them) and 2 GiB in the temporary folder.

A GPU runs machine code (a cubin) of its own compute capability or of a lower one with the same
major number. Code named with an "a" runs on that very capability. If there is none,
the driver compiles PTX of a lower capability when the kernel is first used. A kernel
may be present as an empty function: sources guard their bodies by capability. So a kernel counts if
its code is larger than `_EMPTY`.

The printed cells have the number of kernels, the architecture of their code, and the tensor-core
instruction of the largest. Blind spots: whether the one kernel that a shape needs is among those
counted, and whether it is right.
"""

import argparse
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

CAPABILITIES = ("8.0", "8.9", "9.0", "10.0")
_EMPTY = 512
"""Largest size in bytes of a function without a body, in machine code."""
_EMPTY_PTX = 20
"""Largest number of lines of a kernel without a body, in PTX."""
_INSTRUCTION = re.compile(r"\*/ .*?\b([A-Z]+MMA(?:\.[A-Z0-9]\w*)*)(?= )")
"""A tensor-core instruction in a disassembly."""

_COMMON = "_C_stable_libtorch"
_EXPERTS = "_moe_C_stable_libtorch"

KERNELS = {
    "MarlinLinearKernel, bfloat16": (_COMMON, r"^_ZN6marlin6MarlinILl1125899906909960E"),
    "MarlinLinearKernel, float16": (_COMMON, r"^_ZN6marlin6MarlinILl1125899906910725E"),
    "MacheteLinearKernel": (_COMMON, r"MacheteCollectiveMma"),
    "CutlassInt8ScaledMMLinearKernel": (_COMMON, r"DefaultGemmWithVisitorIa|cutlass_3x_gemmIa"),
    "CutlassFP8ScaledMMLinearKernel": (
        _COMMON,
        r"DefaultGemmWithVisitorINS_12float_e4m3|cutlass_3x_gemm_sm90_fp8"
        r"|enable_sm100_to_sm120.*float_e4m3",
    ),
    "CutlassFp8BlockScaledMMKernel": (_COMMON, r"cutlass_3x_gemm_fp8_blockwise"),
    "CutlassW4A8LinearKernel": (_COMMON, r"GemmUniversalIN4cute.*Sm90.*MixedInput"),
    "CutlassNvFp4LinearKernel": (_COMMON, r"GemmUniversalIN4cute.*BlockScaled.*float_e2m1"),
    "experts, Marlin": (_EXPERTS, r"^_ZN16marlin_moe_wna166MarlinI"),
    "experts, CUTLASS fp8": (_COMMON, r"cutlass_3x_group_gemm"),
    "experts, routing": (_EXPERTS, r"topkGating|moe_align_block_size"),
    "activations to int8": (_COMMON, r"dynamic_scaled_int8_quant_kernel"),
    "activations to fp8": (_COMMON, r"dynamic_per_token_scaled_fp8_quant"),
    "norms, rotary embedding, gate": (
        _COMMON,
        r"rms_norm_kernel|rotary_embedding_kernel|act_and_mul_kernel",
    ),
    "FlashAttention 2": ("_vllm_fa2_C", r"flash_fwd"),
    "FlashAttention 3": ("_vllm_fa3_C", r"FlashAttnFwd"),
}
"""Kernel, as `qarl schemes` names it, or purpose → the library that has it, a pattern of its
functions' names.
"""
MADE_AT_RUN_TIME = {
    "TritonInt8ScaledMMLinearKernel": "Triton, compiled at run time",
    "HummingLinearKernel": "Humming, compiled at run time",
    "HummingNvFp4LinearKernel": "Humming, compiled at run time",
    "HummingMxFp4LinearKernel": "Humming, compiled at run time",
}
"""Kernels that no library of the wheel has → where they are from."""
SAME_CODE = {
    "MarlinLinearKernel": "MarlinLinearKernel, bfloat16",
    "MarlinFP8ScaledMMLinearKernel": "MarlinLinearKernel, bfloat16",
    "MarlinNvFp4LinearKernel": "MarlinLinearKernel, bfloat16",
    "MarlinMxFp4LinearKernel": "MarlinLinearKernel, bfloat16",
}
"""Kernels that are instances of another's template → that kernel."""


@dataclass(frozen=True)
class Code:
    """One kernel's code for one architecture."""

    name: str
    """Mangled name of the function."""
    architecture: str
    """As in "sm_90a"."""
    size: int
    """Bytes of machine code, or lines of PTX."""
    file: Path | None = None
    """The cubin that holds it; None for PTX."""
    index: int = 0
    """Number of the function in the cubin's table of symbols."""

    @property
    def rank(self) -> tuple[int, bool]:
        """Ten times the capability, and whether the code is for it alone."""
        return int(re.sub(r"\D", "", self.architecture)), self.architecture.endswith("a")

    @property
    def empty(self) -> bool:
        """True if the function has no body."""
        return self.size <= (_EMPTY if self.file else _EMPTY_PTX)

    def runs_on(self, capability: str) -> bool:
        """Return whether a GPU of this compute capability can run or compile it."""
        number = int(capability.replace(".", ""))
        if self.architecture.endswith("a"):
            return self.rank[0] == number
        same_major = self.rank[0] // 10 == number // 10
        return self.rank[0] <= number and (same_major or self.file is None)


@dataclass(frozen=True)
class Part:
    """Kernels of a cell whose code has one origin."""

    kernels: int
    """Number of functions with a body."""
    architecture: str
    """Architecture of their code."""
    compiled_by_driver: bool
    """True for PTX, which the driver compiles when a kernel is first used."""
    instruction: str = ""
    """Commonest tensor-core instruction of the largest function; "" if it has none."""

    def __str__(self) -> str:
        origin = f"PTX of {self.architecture}" if self.compiled_by_driver else self.architecture
        instruction = f", `{self.instruction}`" if self.instruction else ""
        return f"{self.kernels} × {origin}{instruction}"


def cubin_codes(cubin: Path) -> Iterator[Code]:
    """Yield the functions of one cubin, a 64-bit ELF file.

    Each has a section ".text.NAME".
    """
    data = cubin.read_bytes()
    architecture = re.search(r"\.(sm_\w+)\.cubin$", cubin.name).group(1)  # type: ignore[union-attr]
    (start,) = struct.unpack_from("<Q", data, 40)
    size, count, strings = struct.unpack_from("<HHH", data, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, start + size * i) for i in range(count)]

    def text(section: int, offset: int) -> str:
        begin = sections[section][4] + offset
        return data[begin : data.index(b"\0", begin)].decode()

    symbols: dict[str, int] = {}
    for section in sections:
        if section[1] == 2:  # a table of symbols, 24 bytes each
            for number in range(section[5] // 24):
                (offset,) = struct.unpack_from("<I", data, section[4] + 24 * number)
                symbols[text(section[6], offset)] = number
    for section in sections:
        name = text(strings, section[0])
        if name.startswith(".text."):
            name = name.removeprefix(".text.")
            yield Code(name, architecture, section[5], cubin, symbols.get(name, 0))


def ptx_codes(library: Path) -> Iterator[Code]:
    """Yield the kernels that a library holds as PTX, with their number of lines."""
    listing = subprocess.run(
        ["cuobjdump", "--dump-ptx", library], check=True, capture_output=True, text=True
    ).stdout
    architecture, name, lines = "", "", 0
    for line in listing.splitlines():
        if line.startswith(".target"):
            architecture = line.split()[1].rstrip(",")
        elif ".entry" in line:
            name, lines = line.split(".entry")[1].strip(" ("), 0
        elif line.startswith("}") and name:
            yield Code(name, architecture, lines)
            name = ""
        lines += 1


def instruction(code: Code) -> str:
    """Return the commonest tensor-core instruction of a function, or ""."""
    listing = subprocess.run(
        ["nvdisasm", "--print-code", "--cuda-function-index", str(code.index), str(code.file)],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    names = _INSTRUCTION.findall(listing)
    return max(sorted(set(names)), key=names.count) if names else ""


def cell(codes: list[Code], capability: str) -> list[Part]:
    """Return what the wheel has for a compute capability, by origin.

    Of each function the driver takes machine code before PTX, and of these the code of the highest
    capability, even if that has no body. PTX beside machine code is left out: it is of a generation
    of kernels that vLLM does not choose there.
    """
    chosen: dict[str, Code] = {}
    for code in sorted(codes, key=lambda code: (code.file is not None, code.rank)):
        if code.runs_on(capability):
            chosen[code.name] = code
    native = any(code.file and not code.empty for code in chosen.values())
    groups: dict[tuple[bool, str], list[Code]] = {}
    for code in chosen.values():
        if not code.empty and (code.file or not native):
            groups.setdefault((code.file is None, code.architecture), []).append(code)
    return [
        Part(len(group), architecture, is_ptx, "" if is_ptx else instruction(_largest(group)))
        for (is_ptx, architecture), group in sorted(groups.items())
    ]


def _largest(codes: list[Code]) -> Code:
    return max(codes, key=lambda code: (code.size, code.name))


def table(wheel: Path, scratch: Path) -> dict[str, dict[str, list[Part]]]:
    """Return for each kernel what the wheel has for each compute capability."""
    with zipfile.ZipFile(wheel) as archive:
        libraries = {
            Path(name).name.split(".")[0]: archive.extract(name, scratch)
            for name in archive.namelist()
            if Path(name).name.split(".")[0] in {library for library, _ in KERNELS.values()}
        }
    rows: dict[str, dict[str, list[Part]]] = {}
    for library in dict.fromkeys(library for library, _ in KERNELS.values()):
        if library not in libraries:
            sys.exit(
                f"{wheel} has no {library}; give a wheel of vLLM 0.32 or later for CUDA"
                " (manylinux, x86-64)"
            )
        folder = scratch / f"{library}-cubins"
        folder.mkdir()
        extract = ["cuobjdump", "--extract-elf", "all", libraries[library]]
        subprocess.run(extract, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        codes = [code for cubin in sorted(folder.iterdir()) for code in cubin_codes(cubin)]
        codes += ptx_codes(Path(libraries[library]))
        for kernel, (of_library, pattern) in KERNELS.items():
            if of_library == library:
                matching = [code for code in codes if re.search(pattern, code.name)]
                rows[kernel] = {c: cell(matching, c) for c in CAPABILITIES}
        shutil.rmtree(folder)
    return {kernel: rows[kernel] for kernel in KERNELS}


def main() -> None:
    """Print the table of a wheel as markdown."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wheel", type=Path, help="file of the wheel")
    parser.add_argument("--json", type=Path, help="also write the table to this file")
    options = parser.parse_args()
    for tool in ("cuobjdump", "nvdisasm"):
        if not shutil.which(tool):
            sys.exit(f"{tool} is not in PATH; the Python package nvidia-cuda-{tool} has it")
    if not zipfile.is_zipfile(options.wheel):
        sys.exit(f"{options.wheel} is not a wheel; download one: pip download --no-deps vllm")
    with tempfile.TemporaryDirectory() as scratch:
        rows = table(options.wheel, Path(scratch))
    print(f"| kernel | {' | '.join(CAPABILITIES)} |\n|---|{'---|' * len(CAPABILITIES)}")
    for kernel, cells in rows.items():
        texts = ("; ".join(map(str, cells[c])) or "–" for c in CAPABILITIES)
        print(f"| {kernel} | {' | '.join(texts)} |")
    if options.json:
        from qarl.cli.options import write_json
        from qarl.report.record import record

        kernels = {
            kernel: {c: [asdict(part) for part in parts] for c, parts in cells.items()}
            for kernel, cells in rows.items()
        }
        data = {"wheel": options.wheel.name, "kernels": kernels}
        command = f"python scripts/wheel_kernels.py {options.wheel.name}"
        write_json(str(options.json), record([], data, command))


if __name__ == "__main__":
    main()
