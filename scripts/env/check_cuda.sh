#!/usr/bin/env bash
# Report what this machine lacks for `make env DEVICE=cuda`: NVIDIA's driver, a GPU, a C compiler, Python.h.
# Exit status: 1 if something is missing. Argument: the interpreter (default python3).
set -uo pipefail

LEAST_DRIVER=580                 # required by CUDA 13, for which torch is built
LEAST_CAPABILITY=8               # the lowest major compute capability that vLLM's kernels for low bits are built for
python="${1:-python3}"
missing=0
lacks() { printf '[env] MISSING: %s\n[env]          %s\n' "$1" "$2" >&2; missing=1; }

driver="$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1)"
capability="$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1)"
if ! command -v nvidia-smi >/dev/null; then
    lacks "NVIDIA's driver (no nvidia-smi)" "install driver >= $LEAST_DRIVER; in a container, start it with the GPUs (--gpus all)"
elif [[ ! $driver ]]; then
    lacks "a GPU (nvidia-smi names none)" "look at: nvidia-smi; without a GPU: make env DEVICE=cpu"
elif ((${driver%%.*} < LEAST_DRIVER)); then
    lacks "a driver for CUDA 13 (it is $driver)" "update it to $LEAST_DRIVER or later"
fi
if [[ $capability ]] && ((${capability%%.*} < LEAST_CAPABILITY)); then
    lacks "a GPU of compute capability $LEAST_CAPABILITY.0 or later (this one has $capability)" \
        "use an A100, L40S, H100, B200 or a later one"
fi
command -v gcc >/dev/null || command -v clang >/dev/null || lacks "a C compiler (gcc or clang)" \
    "Triton builds its kernels' launchers with it (Debian, Ubuntu: apt install gcc)"
header="$("$python" -c 'import os, sysconfig; print(os.path.join(sysconfig.get_paths()["include"], "Python.h"))' 2>/dev/null)"
[[ -f $header ]] || lacks "Python.h of $python" "Triton compiles against it (Debian, Ubuntu: apt install python3-dev)"
exit "$missing"
