#!/usr/bin/env bash
# What to do with a GPU that is at hand for 45 minutes, by commands of ten minutes, without a network, to which files go
# in pieces of 60 MiB. It has been rehearsed on CPUs (docs/lab/cuda-measured.md) and not run on a GPU yet.
#
#   scripts/gpu_half_hour.sh pack WHEELS PIECES   here: the committed files, a tokenizer and the wheels, cut into pieces.
#                                                 For WHEELS: pip wheel --no-deps -r scripts/env/cuda.lock uv -w WHEELS
#   bash gpu_half_hour.sh join PIECES FOLDER      there: check the pieces and put them together in FOLDER
#   FOLDER/qarl/scripts/gpu_half_hour.sh run OUT  there, again and again: steps by worth, until it prints "all passed"
#   scripts/gpu_half_hour.sh table OUT            print the results as the tables of docs/lab/cuda-measured.md
#
# A call of `run` starts no step that could end after LIMIT seconds (default 580), and no step that has passed before.
# OUT receives a log and a JSON file per step: {"step", "status", "seconds", "log"}. Exit status of `run`: the number of
# failed steps, a step whose base failed among them; 75 if it should be called again; 2 if this machine cannot do it.
#
# DEVICE=cpu SHAPE=tiny rehearses on a CPU. PYTHON: the interpreter, 3.11. VENV: an environment that is there already.
set -uo pipefail

PIECE=60M
LIMIT="${LIMIT:-580}"
DEVICE="${DEVICE:-cuda}"
SHAPE="${SHAPE:-qwen3-0.6b}"
PYTHON="${PYTHON:-python3.11}"
SCHEMES=(bf16 w8a8 fp8 w4a16)
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

die() { printf '[gpu] ERROR: %s\n[gpu]        %s\n' "$1" "$2" >&2; exit 2; } # what is wrong, remedy

# ---------------------------------------------------------------- pack, join
pack() { # WHEELS PIECES
    local wheels=$1 pieces=$2 stage tokenizer command
    command="$PYTHON -m pip wheel --no-deps -r scripts/env/$DEVICE.lock uv -w '$wheels'"
    compgen -G "$wheels/*.whl" >/dev/null || die "no wheels in '$wheels'" "$command"
    compgen -G "$wheels/uv-*.whl" >/dev/null || die "no wheel of uv in '$wheels', which installs the others there" "$command"
    if compgen -G "$wheels/*.tar.gz" >/dev/null; then
        die "$(basename -a "$wheels"/*.tar.gz | paste -sd' ') would have to be built there, maybe without a compiler" \
            "remove them and build their wheels: $command"
    fi
    [[ ! -d $pieces || ! "$(ls -A "$pieces")" ]] || die "'$pieces' is not empty" "name a new folder"
    tokenizer="$(cd "$root" && "${VENV:-.venv}/bin/python" -m qarl.embedded.real_model)" || die \
        "no tokenizer" "make real-model shows why"
    stage="$(mktemp -d)"
    mkdir -p "$pieces" "$stage/qarl" "$stage/tokenizer"
    git -C "$root" archive HEAD | tar -x -C "$stage/qarl"
    git -C "$root" rev-parse HEAD >"$stage/commit"
    find "$tokenizer" -type f ! -name '*.safetensors' ! -name config.json -exec cp {} "$stage/tokenizer" \;
    ln -s "$(realpath "$wheels")" "$stage/wheels"
    tar -ch -C "$stage" commit qarl tokenizer wheels | split -b "$PIECE" -d -a 3 - "$pieces/piece-"
    (cd "$pieces" && sha256sum piece-* >SHA256SUMS)
    rm -rf "$stage"
    cp "$root/scripts/gpu_half_hour.sh" "$pieces"
    echo "[gpu] $(wc -l <"$pieces/SHA256SUMS") pieces, $(du -sm "$pieces" | cut -f1) MiB, in $pieces; send SHA256SUMS and gpu_half_hour.sh first"
}

join() { # PIECES FOLDER
    local pieces=$1 folder=$2 sum name absent=() damaged=() total=0
    [[ -f $pieces/SHA256SUMS ]] || die "no SHA256SUMS in '$pieces'" "send it, gpu_half_hour.sh and the pieces into one folder"
    while read -r sum name; do
        total=$((total + 1))
        if [[ ! -f $pieces/$name ]]; then
            absent+=("$name")
        elif [[ "$(sha256sum <"$pieces/$name" | cut -d' ' -f1)" != "$sum" ]]; then
            damaged+=("$name")
        fi
    done <"$pieces/SHA256SUMS"
    if ((${#absent[@]} + ${#damaged[@]})); then
        die "of $total pieces ${#absent[@]} are missing (${absent[*]:0:4}${absent[4]:+ …}) and ${#damaged[@]} are damaged (${damaged[*]:0:4}${damaged[4]:+ …})" \
            "send those and call this again; the others stay"
    fi
    mkdir -p "$folder"
    cut -c67- "$pieces/SHA256SUMS" | sed "s|^|$pieces/|" | xargs -d '\n' cat | tar -x -C "$folder"
    echo "[gpu] $total pieces are in $folder; next: $folder/qarl/scripts/gpu_half_hour.sh run OUT"
}

# ---------------------------------------------------------------- run
passed() { grep -q '"status": 0' "$out/$1.json" 2>/dev/null; }

# step NAME MINUTES BASE COMMAND...   BASE: the step it depends on, or -
step() {
    local name=$1 minutes=$2 base=$3 start=$SECONDS status
    shift 3
    if passed "$name"; then return; fi
    if [[ $base != - ]] && ! passed "$base"; then
        echo "[gpu] $name: skipped, $base failed"
        failed=$((failed + 1))
        return
    fi
    if ((started && SECONDS + minutes * 60 > LIMIT)); then
        echo "[gpu] $name needs up to $minutes minutes more; call this again"
        exit 75
    fi
    started=1
    echo "[gpu] $name: $*"
    # a shell, because some commands are the functions below; no network
    HF_HUB_OFFLINE=1 timeout "$((minutes * 60))" bash -c '"$@"' "$name" "$@" >"$out/$name.log" 2>&1
    status=$?
    printf '{"step": "%s", "status": %d, "seconds": %d, "log": "%s.log"}\n' \
        "$name" "$status" "$((SECONDS - start))" "$name" >"$out/$name.json"
    if ((status)); then
        failed=$((failed + 1))
        echo "[gpu] $name: status $status, the end of $out/$name.log:"
        tail -n 15 "$out/$name.log"
    fi
}

environment() { # the wheels into a new environment, by uv, which takes a fraction of pip's time
    if [[ -x $venv/bin/qarl ]]; then return; fi
    local from=(--offline --no-index --find-links "$root/../wheels")
    "$PYTHON" -m venv "$venv" &&
        "$python" -m pip install --quiet --no-index --find-links "$root/../wheels" uv &&
        "$venv/bin/uv" pip install --python "$python" --no-deps "${from[@]}" -r "$root/scripts/env/$DEVICE.lock" &&
        "$venv/bin/uv" pip install --python "$python" --no-deps "${from[@]}" --no-build-isolation -e "$root" && "$qarl" schemes
}
tests() { "$python" -m pytest -q -x -m gpu "$@"; }
model() { "$python" scripts/random_model.py "$SHAPE" "$out/model" --tokenizer "$root/../tokenizer"; }
run() { # NAME OPTIONS...: a training in a fresh folder, with the GPU's used memory once a second
    local name=$1 watch status
    shift
    rm -rf "$out/runs/$name"
    nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits -l 1 >"$out/$name.mib" 2>/dev/null &
    watch=$!
    "$qarl" train --output "$out/runs/$name" "$@"
    status=$?
    kill $watch 2>/dev/null
    return $status
}
real_shape() { # NAME SCHEME OPTIONS...: three steps of 128 answers, their publishes, and the export answered by a fresh engine
    local name=$1 scheme=$2 steps=3 answer=256 prompts=16
    shift 2
    if [[ $DEVICE == cpu ]]; then steps=1 answer=16 prompts=4; fi
    run "$name" --config tiny-qwen3 --model "$out/model" --scheme "$scheme" --steps "$steps" --task.reward scripts/gpu_half_hour.py:letters \
        --eval.problems 0 --rollout.prompts "$prompts" --rollout.samples 8 --rollout.max_new_tokens "$answer" \
        --learner.micro_batch_tokens 16384 --sync.canary_every 1 "$@"
}
killed_and_resumed() { # a run of 20 steps that is killed at its first checkpoint and resumed
    rm -rf "$out/runs/resumed"
    "$qarl" train --output "$out/runs/resumed" --steps 20 --checkpoint.every 2 &
    local pid=$!
    until [[ -d $out/runs/resumed/checkpoints ]] && ls "$out/runs/resumed/checkpoints"/step-* >/dev/null 2>&1; do
        kill -0 $pid 2>/dev/null || return 1
        sleep 1
    done
    kill -9 $pid
    wait $pid
    "$qarl" train --resume "$out/runs/resumed"
}
large() { # SHAPE LAYERS NAME OPTIONS...: three steps of a real shape with random weights
    local shape=$1 layers=$2 name=$3
    shift 3
    "$python" scripts/random_model.py "$shape" "$out/models/$shape-$layers" --layers "$layers" &&
        run "$name" --config tiny-qwen3 --model "$out/models/$shape-$layers" --steps 3 --eval.problems 0 \
            --task.reward scripts/gpu_half_hour.py:letters \
            --learner.micro_batch_tokens 8192 --learner.gradient_checkpointing true "$@"
}
table() { "$python" scripts/gpu_half_hour.py "$out"; }

run_steps() { # OUT
    local scheme
    started=0
    failed=0
    mkdir -p "$out"
    if [[ $DEVICE == cuda ]]; then
        bash scripts/env/check_cuda.sh "$PYTHON" || die "this machine lacks what is named above" "no step was started"
    fi
    command -v "$PYTHON" >/dev/null || [[ -x $python ]] || die "no interpreter '$PYTHON'" \
        "the wheels are for Python 3.11: PYTHON=/path/to/python3.11, or VENV=an environment that has QaRL"
    [[ -x $qarl || -d $root/../wheels ]] || die "neither $venv nor wheels beside $root" "use pack and join, or: make env DEVICE=cuda"

    step environment 8 - environment
    step model 5 environment model
    # distance of learner and sampler, decode, step, publish, memory and export
    for scheme in "${SCHEMES[@]}"; do step "$scheme" 8 model real_shape "$scheme" "$scheme"; done
    for scheme in "${SCHEMES[@]}"; do
        step "$scheme-bitwise" 8 "$scheme" real_shape "$scheme-bitwise" "$scheme" --bitwise true
    done
    step table 1 bf16 table
    if [[ $DEVICE == cpu ]]; then return; fi
    # what is left of the time: checks with torch alone, then codes, products, operators, gradients
    step torch 8 environment "$python" scripts/gpu_torch.py "$out"
    step codes 5 environment tests tests/gpu/test_gpu.py -k codes
    step products 5 codes tests tests/gpu/test_gpu.py -k products
    step compiled 5 codes tests tests/quant/test_fused.py
    step operators 5 environment tests tests/gpu/test_operators.py -k "not experts"
    step gradients 5 products tests tests/gpu/test_gpu.py -k "gradients or experts_agree"
    step learning 5 gradients tests tests/gpu/test_learning.py
    step experts 5 gradients tests tests/gpu/test_operators.py -k experts
    # the engine after five publishes: dense and experts, without and with CUDA graphs
    step engine 6 products tests tests/gpu/test_gpu.py -k "fresh_one and dense and eager"
    step engine-experts 6 engine tests tests/gpu/test_gpu.py -k "fresh_one and experts and eager"
    step engine-graphs 6 engine tests tests/gpu/test_gpu.py -k "fresh_one and graphs"
    step mismatch 6 engine "$python" -m benchmarks mismatch --json "$out/mismatch-table.json"
    step nearer 6 engine tests tests/gpu/test_runs.py -k "nearer or learners"
    step bits 8 engine tests tests/gpu/test_runs.py -k bits
    # complete runs: train, export, resume
    step train 5 engine run w4a16-eager --rollout.enforce_eager true --steps 20
    step train-experts 5 engine-experts run experts --config tiny-qwen3-moe --model tiny-qwen3-moe --steps 10
    step resume 5 train killed_and_resumed
    step options 8 train tests tests/gpu/test_runs.py -k "options or replayed or resumption"
    # real shapes: peak memory against the plan; each run's metrics.jsonl has the seconds per phase
    step memory 8 train tests tests/gpu/test_runs.py -k memory
    step large 8 train large qwen3-1.7b 28 large
    step large-experts 8 train-experts large qwen3-30b-a3b 4 large-experts --learner.lora.name lora
}

case "${1:-} $#" in
    "pack 3") pack "$2" "$3" ;;
    "join 3") join "$2" "$3" ;;
    "run 2" | "table 2")
        out="$(realpath -m "$2")"
        cd "$root" || exit 1
        venv="${VENV:-${QARL_ENV:-$root/.venv}}"
        python="$venv/bin/python"
        qarl="$venv/bin/qarl"
        export python qarl out root venv DEVICE SHAPE PYTHON
        export -f environment tests model run real_shape killed_and_resumed large table
        if [[ $1 == table ]]; then table; exit; fi
        run_steps
        if ((failed)); then echo "[gpu] failed: $failed; results in $out"; else echo "[gpu] all passed; results in $out"; fi
        exit "$failed"
        ;;
    *)
        sed -n '5,9p' "${BASH_SOURCE[0]}" >&2
        exit 2
        ;;
esac
