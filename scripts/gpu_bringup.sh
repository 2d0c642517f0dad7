#!/usr/bin/env bash
# The first hour on a GPU: checks that only a GPU can answer. Steps that others depend on come first.
# This script has not run on a GPU yet.
#
#   scripts/gpu_bringup.sh [FOLDER]     default: gpu-bringup
#
# FOLDER receives a log and a JSON file per step: {"step", "status", "seconds", "log"}, and the commands' own files. A
# step that passed is not run again, so start the script again after a repair. Exit status: the number of failed steps.
# A step whose base failed is skipped and counts as failed.
set -uo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
out="$(realpath -m "${1:-gpu-bringup}")"
venv="${VENV:-${QARL_ENV:-.venv}}"
python="$venv/bin/python"
qarl="$venv/bin/qarl"
mkdir -p "$out"
failed=0

passed() { grep -q '"status": 0' "$out/$1.json" 2>/dev/null; }

# step NAME MINUTES BASE COMMAND...   BASE: the step it depends on, or -
step() {
    local name=$1 minutes=$2 base=$3 start=$SECONDS status
    shift 3
    if passed "$name"; then echo "[gpu] $name: passed before"; return; fi
    if [[ $base != - ]] && ! passed "$base"; then
        echo "[gpu] $name: skipped, $base failed"
        failed=$((failed + 1))
        return
    fi
    echo "[gpu] $name: $*"
    timeout "$((minutes * 60))" bash -c '"$@"' "$name" "$@" >"$out/$name.log" 2>&1 # a shell, because some commands are the functions below
    status=$?
    printf '{"step": "%s", "status": %d, "seconds": %d, "log": "%s.log"}\n' \
        "$name" "$status" "$((SECONDS - start))" "$name" >"$out/$name.json"
    if ((status)); then
        failed=$((failed + 1))
        echo "[gpu] $name: status $status, the end of $out/$name.log:"
        tail -n 15 "$out/$name.log"
    fi
}

tests() { "$python" -m pytest -q -x -m gpu "$@"; }
run() { # NAME OPTIONS...: a training in a fresh folder
    local name=$1
    shift
    rm -rf "$out/runs/$name"
    "$qarl" train --output "$out/runs/$name" "$@"
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
            --learner.micro_batch_tokens 8192 --learner.gradient_checkpointing true "$@"
}
export python qarl out
export -f tests run killed_and_resumed large

# checks with torch and transformers alone, in any environment that has them (PYTHON); each takes a few minutes
step torch 8 - "${PYTHON:-python3}" scripts/gpu_torch.py "$out"
# the environment, and the schemes that run
step environment 10 - make env DEVICE=cuda
step schemes 5 environment "$qarl" schemes --json "$out/schemes-table.json"
# codes equal to the CPU's; products
step codes 5 environment tests tests/gpu/test_gpu.py -k codes
step products 5 codes tests tests/gpu/test_gpu.py -k products
step compiled 5 codes tests tests/quant/test_fused.py
# norms, rotary embedding, gate, router, activation codes and attention, compared with the engine's
step operators 5 environment tests tests/gpu/test_operators.py -k "not experts"
# gradients; experts at real shapes
step gradients 5 products tests tests/gpu/test_gpu.py -k "gradients or experts_agree"
step learning 5 gradients tests tests/gpu/test_learning.py
step experts 5 gradients tests tests/gpu/test_operators.py -k experts
# the engine after five publishes: dense and experts, without and with CUDA graphs
step engine 6 products tests tests/gpu/test_gpu.py -k "fresh_one and dense and eager"
step engine-experts 6 engine tests tests/gpu/test_gpu.py -k "fresh_one and experts and eager"
step engine-graphs 6 engine tests tests/gpu/test_gpu.py -k "fresh_one and graphs"
# distance of learner and sampler
step mismatch 6 engine "$python" -m benchmarks mismatch --json "$out/mismatch-table.json"
step nearer 6 engine tests tests/gpu/test_runs.py -k "nearer or learners"
step bitwise 8 engine tests tests/gpu/test_runs.py -k bits
# complete runs: train, export, resume
step train 5 engine run w4a16 --rollout.enforce_eager true --steps 20
step train-w8a8 5 train run w8a8 --scheme w8a8 --steps 10
step train-fp8 5 train run fp8 --scheme fp8 --steps 10
step train-experts 5 engine-experts run experts --config tiny-qwen3-moe --model tiny-qwen3-moe --steps 10
step train-graphs 5 engine-graphs run graphs --rollout.enforce_eager false --steps 10
step resume 5 train killed_and_resumed
step options 8 train tests tests/gpu/test_runs.py -k "options or replayed or resumption"
# real shapes: peak memory against the plan; each run's metrics.jsonl has the seconds per phase
step memory 8 train tests tests/gpu/test_runs.py -k memory
step large 8 train large qwen3-1.7b 28 large
step large-experts 8 train-experts large qwen3-30b-a3b 4 large-experts --learner.lora.name lora

echo "[gpu] failed: $failed; results in $out"
exit "$failed"
