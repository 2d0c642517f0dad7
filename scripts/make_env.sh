#!/usr/bin/env bash
# Make or update QaRL's environment from its lock, and install the project into it (editable).
#
#   scripts/make_env.sh [--cpu | --cuda] [--venv FOLDER]   default: --cpu, $VENV, $QARL_ENV or .venv
#   scripts/make_env.sh --lock [--upgrade ...]             compile all locks again; the rest goes to uv
#
# PYTHON names the interpreter (default python3). One package, pycosat, is built from C here, because it has no wheel; on
# GPUs Triton builds at run time, and what a machine lacks for that is told (scripts/env/check_cuda.sh).
#
# The folder holds two files of ours. `.qarl-env` is written first and says "this folder is QaRL's, made
# at this path"; `.qarl-stamp` is written last and holds a hash of everything the environment is made from.
# So a matching stamp means there is nothing to do, and an interrupted run is simply continued.
set -euo pipefail

UV_VERSION=0.13.8                # installed where PATH has no uv
MIN_PYTHON=3.11
LOCK_PYTHON=3.11                 # the locks are resolved for this release
MIN_FREE_GIB=6                   # with CUDA twice that
TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu

say() { printf '[env] %s\n' "$*" >&2; }
die() { printf '[env] ERROR: %s\n[env]        %s\n' "$1" "$2" >&2; exit 1; }  # what is missing, remedy

# ---------------------------------------------------------------- arguments
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
python="${PYTHON:-python3}"
venv=
device=cpu
relock=
uv_lock_args=()
while (($#)); do
    case "$1" in
        --cpu) device=cpu ;;
        --cuda) device=cuda ;;
        --venv) venv="${2:?--venv needs a folder}"; shift ;;
        --lock) relock=1 ;;
        *)
            [[ $relock ]] || die "unknown option '$1'" "allowed: --cpu, --cuda, --venv FOLDER, --lock [options of uv pip compile]"
            uv_lock_args+=("$1") ;;
    esac
    shift
done
cd "$root"
venv="${venv:-${VENV:-${QARL_ENV:-.venv}}}"
[[ $venv == /* ]] || venv="$root/$venv"
venv="$(realpath -ms "$venv")"   # no symlink is followed: scripts inside name this very path
lock="scripts/env/$device.lock"
marker="$venv/.qarl-env"
stamp="$venv/.qarl-stamp"

fingerprint() {
    { sha256sum "$lock" pyproject.toml scripts/make_env.sh; printf '%s\n' "$device" "$root" "$venv"; } | sha256sum | cut -d' ' -f1
}

# ---------------------------------------------------------------- checks
check_platform() {
    local found
    found="$(uname -s) $(uname -m)"
    [[ $found == "Linux x86_64" ]] || die "the locks are for Linux x86_64, this is $found" \
        "use a Linux x86-64 machine or container"
}

python_is_enough() { "$1" -c "import sys; sys.exit(sys.version_info < (${MIN_PYTHON/./, }))" 2>/dev/null; }

check_python() {
    command -v -- "$python" >/dev/null || die "no interpreter '$python'" \
        "install Python >= $MIN_PYTHON, or name one: make env PYTHON=/path/to/python$LOCK_PYTHON"
    python_is_enough "$python" || die "$python is $("$python" --version 2>&1), needed is >= $MIN_PYTHON" \
        "name a newer one: make env PYTHON=python$LOCK_PYTHON"
    "$python" -c 'import venv, ensurepip' 2>/dev/null || die "$python lacks the venv or the ensurepip module" \
        "install it (Debian, Ubuntu: apt install python3-venv) or name another one: make env PYTHON=..."
}

check_disk() {
    local folder="$venv" free
    while [[ ! -d $folder ]]; do folder="$(dirname "$folder")"; done
    free=$(($(df -Pk "$folder" | awk 'NR == 2 {print $4}') / 1024 / 1024))
    ((free >= MIN_FREE_GIB)) || die "$free GiB free at $folder, needed are $MIN_FREE_GIB" \
        "free some space, or put the environment elsewhere: make env VENV=/other/disk/qarl-env"
}

check_compiler() {
    command -v cc >/dev/null || command -v gcc >/dev/null || die "no C compiler, and pycosat of $lock has no wheel" \
        "install one with Python's headers (Debian, Ubuntu: apt install gcc python3-dev)"
}

# vLLM's operators for CPUs are linked to it; a package of the distribution has it, no wheel.
check_numa() {
    [[ $device == cpu ]] || return 0
    "$venv/bin/python" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null ||
        die "no libnuma.so.1, which vLLM's operators for CPUs need" "install it (Debian, Ubuntu: apt install libnuma1)"
}

# Syncing removes every package that is not in the lock, so only ever touch a folder that is ours.
check_folder() {
    [[ ! -e $venv || -d $venv ]] || die "$venv is not a folder" "remove it, or choose another one: make env VENV=..."
    [[ -d $venv && ! -e $marker && -n "$(ls -A "$venv")" ]] || return 0
    [[ -f $venv/pyvenv.cfg ]] || die "$venv holds files but is not a Python environment" \
        "empty it, or choose another one: make env VENV=..."
    [[ $venv == "$root/.venv" ]] || die "$venv is an environment that QaRL did not make; setting up would remove its packages" \
        "choose another folder, or hand this one over: touch '$marker'"
}

# ---------------------------------------------------------------- parts
# An environment is made anew where its interpreter is gone or too old, or where the folder was moved
# (scripts inside name the old path).
make_venv() {
    local made_at
    made_at="$(cat "$marker" 2>/dev/null || true)"
    if python_is_enough "$venv/bin/python" && "$venv/bin/python" -m pip --version >/dev/null 2>&1 &&
        [[ -z $made_at || $made_at == "$venv" ]]; then
        printf '%s\n' "$venv" >"$marker"
        return
    fi
    check_python
    say "creating $venv with $("$python" --version)"
    mkdir -p "$venv"
    printf '%s\n' "$venv" >"$marker"
    find "$venv" -mindepth 1 -maxdepth 1 ! -name .qarl-env -exec rm -rf {} +
    "$python" -m venv "$venv"
}

find_uv() { # sets uv
    uv="$(command -v uv || true)"
    [[ -n $uv ]] && return
    uv="$venv/bin/uv"
    [[ -x $uv ]] || "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "uv==$UV_VERSION"
}

# uv does not read pip's configuration: hand on the wheel folders and the mirror that are set there.
read_pip_config() { # sets find_links (array); exports UV_DEFAULT_INDEX
    local pip=("$python" -m pip) links index
    [[ -x $venv/bin/python ]] && pip=("$venv/bin/python" -m pip)
    links="${PIP_FIND_LINKS:-$("${pip[@]}" config get global.find-links 2>/dev/null || true)}"
    links+=" ${UV_FIND_LINKS:-}"
    IFS=$' ,\t\n' read -r -d '' -a find_links <<<"$links" || true # pip separates by white space, uv by commas
    index="${PIP_INDEX_URL:-$("${pip[@]}" config get global.index-url 2>/dev/null || true)}"
    if [[ -n $index && -z ${UV_DEFAULT_INDEX:-}${UV_INDEX_URL:-} ]]; then export UV_DEFAULT_INDEX="$index"; fi
}

# Where uv finds torch: a +cpu wheel from pip's wheel folders if one fits this interpreter, else from the
# PyTorch project's CPU index. That index also carries old releases of other packages, hence the
# strategy. (Not tried yet: the machine QaRL was first built on had the wheel, but not this index.)
# For CUDA the wheel folders are left out: there `torch==X` would also be satisfied by an X+cpu wheel.
torch_source() { # arguments: cpu|cuda, the interpreter's X.Y; sets source_args (array)
    local link tag="cp${2/./}" torch
    source_args=()
    unset UV_FIND_LINKS # part of find_links by now
    [[ $1 != cuda ]] || return 0
    for link in ${find_links[@]+"${find_links[@]}"}; do source_args+=(--find-links "$link"); done
    torch="$(sed -nE 's/^torch==([^ ;]+).*/\1/p' scripts/env/cpu.in)"
    for link in ${find_links[@]+"${find_links[@]}"}; do
        link="${link#file://}"
        compgen -G "${link%/}/torch-$torch-$tag-*" >/dev/null && return 0
        compgen -G "${link%/}/torch-${torch/+/%2B}-$tag-*" >/dev/null && return 0
    done
    source_args+=(--extra-index-url "$TORCH_CPU_INDEX" --index-strategy unsafe-best-match)
}

compile_locks() {
    check_folder
    command -v uv >/dev/null || make_venv # only then does uv need a place to live
    find_uv
    read_pip_config
    local name overrides
    for name in cpu cuda; do
        torch_source "$name" "$LOCK_PYTHON"
        overrides=()
        if [[ -e scripts/env/$name.overrides.txt ]]; then overrides=(--override "scripts/env/$name.overrides.txt"); fi
        say "compiling scripts/env/$name.lock"
        UV_CUSTOM_COMPILE_COMMAND="make lock" "$uv" pip compile "scripts/env/$name.in" \
            ${overrides[@]+"${overrides[@]}"} --output-file "scripts/env/$name.lock" --quiet \
            --python-version "$LOCK_PYTHON" --python-platform x86_64-manylinux_2_28 \
            ${source_args[@]+"${source_args[@]}"} ${uv_lock_args[@]+"${uv_lock_args[@]}"}
    done
}

sync_env() {
    if [[ $device == cuda ]]; then
        MIN_FREE_GIB=$((2 * MIN_FREE_GIB))
        bash scripts/env/check_cuda.sh "$python" || say "going on: what is made here runs once that is mended (qarl check --machine)"
    fi
    [[ -f $stamp ]] || check_disk
    check_compiler
    rm -f "$stamp"
    make_venv
    check_numa
    find_uv
    read_pip_config
    torch_source "$device" "$("$venv/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
    say "installing $lock with $("$uv" --version)"
    "$uv" pip sync --python "$venv/bin/python" ${source_args[@]+"${source_args[@]}"} "$lock"
    "$uv" pip install --quiet --python "$venv/bin/python" --no-deps --no-build-isolation -e .
}

# Commands then begin at once, also in containers whose PYTHONDONTWRITEBYTECODE makes every process compile
# 5,000 files anew. What they import is a third of what is installed, so it is imported, not all compiled.
prepare_commands() {
    local python=(env -u PYTHONDONTWRITEBYTECODE "$venv/bin/python")
    say "compiling what commands import, and asking this machine's kernels"
    "${python[@]}" -c 'import reasoning_gym, vllm.entrypoints.llm, vllm.v1.worker.cpu_worker
from qarl.quant.kernels.cpu_attention import kept_head_sizes
kept_head_sizes()' >/dev/null 2>&1 &
    "${python[@]}" -m qarl schemes >/dev/null 2>&1 || say "going on: qarl schemes failed, and tells why"
    wait
}

# ---------------------------------------------------------------- main
check_platform
export UV_HTTP_TIMEOUT="${UV_HTTP_TIMEOUT:-300}" # some wheels are large
if [[ $relock ]]; then
    compile_locks
    exit
fi
want="$(fingerprint)"
up_to_date() { [[ -x $venv/bin/python && "$(cat "$stamp" 2>/dev/null)" == "$want" ]]; }
if up_to_date; then exit; fi
check_folder
mkdir -p "$venv"
if command -v flock >/dev/null; then # two set-ups of one folder wait for each other
    exec 9<"$venv"
    flock 9
    if up_to_date; then exit; fi
fi
sync_env
prepare_commands
printf '%s\n' "$want" >"$stamp"
say "ready: $venv; for the command qarl in this shell: source $venv/bin/activate"
