#!/usr/bin/env bash
# Build the wheel, install it without the checkout, and use it: train, export, serve, two processes, a server. The working
# folder has packages with the names of QaRL's own, which must not be imported. It takes minutes and leaves no files.
#
#   scripts/check_wheel.sh
#
# Exit status: 0 if all passed.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
scratch="$(mktemp -d)"
server=
trap '[[ -z $server ]] || kill "$server" 2>/dev/null || true; rm -rf "$scratch"' EXIT
say() { printf '[wheel] %s\n' "$*"; }

git clone --quiet "$root" "$scratch/source"
"${PYTHON:-python3}" -m venv "$scratch/env"
python="$scratch/env/bin/python"
"$python" -m pip wheel --quiet --no-deps --wheel-dir "$scratch" "$scratch/source"
# Only what the wheel's own metadata asks for, in an empty environment. Folders of wheels that pip knows have the CPU
# build of torch; elsewhere it is the PyTorch project's index that has it.
UV_FIND_LINKS="${UV_FIND_LINKS:-$("$python" -m pip config get global.find-links 2>/dev/null || true)}"
export UV_FIND_LINKS
if [[ $UV_FIND_LINKS ]]; then export TORCH_INDEX=; fi
bash "$scratch/source/docker/install.sh" cpu "$python" "$(echo "$scratch"/qarl_train-*.whl)"
rm -rf "$scratch/source"
say "installed, with $("$python" -m pip list 2>/dev/null | tail -n +3 | wc -l) packages"
names="$("$python" -c 'import sys, zipfile; print(*sorted({n.split("/")[0] for n in zipfile.ZipFile(sys.argv[1]).namelist()}))' "$scratch"/qarl_train-*.whl)"
say "the wheel holds: $names"
[[ $names =~ ^qarl\ qarl_train-[^\ ]*\.dist-info$ ]]

mkdir "$scratch/work"
cd "$scratch/work"
for room in configs quant learner rollout sync tests; do
    mkdir "$room"
    echo "raise ImportError('the decoy $room was imported')" >"$room/__init__.py"
done
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" QARL_CACHE="$scratch/cache"
qarl=("$scratch/env/bin/qarl")
run() { # arguments: label, command...
    local what="$1" log="$scratch/log"
    shift
    "$@" >"$log" 2>&1 || { tail -n 60 "$log"; say "$what: FAILED"; exit 1; }
    say "$what: passed"
}
small=(--steps 2 --prompts 8 --eval.problems 16)

run "train two steps" "${qarl[@]}" train "${small[@]}" --output one
run "train with python -m qarl" "$python" -m qarl train "${small[@]}" --scheme w8a8 --output module
run "export" "${qarl[@]}" export one --output exported
run "train in two processes" "${qarl[@]}" train "${small[@]}" --processes 2 --output two
run "train with a server" "${qarl[@]}" train "${small[@]}" --rollout.servers 1 --output served

port="$("$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')"
"${qarl[@]}" serve exported --port "$port" >"$scratch/serve.log" 2>&1 &
server=$!
answered() { # wait until the server answers
    local _
    for _ in $(seq 180); do
        if curl --silent --fail "http://127.0.0.1:$port/v1/models" >/dev/null; then return 0; fi
        kill -0 "$server" 2>/dev/null || break
        sleep 1
    done
    cat "$scratch/serve.log"
    return 1
}
run "serve the export" answered
model="$(curl --silent "http://127.0.0.1:$port/v1/models" | "$python" -c 'import json, sys; print(json.load(sys.stdin)["data"][0]["id"])')"
run "sample from it" curl --silent --fail "http://127.0.0.1:$port/v1/completions" \
    --header 'Content-Type: application/json' --data "{\"model\": \"$model\", \"prompt\": \"1+1=\", \"max_tokens\": 4}"
