#!/usr/bin/env bash
# QaRL into the environment of an interpreter, without what only developers need, in the versions that the suite runs
# with (scripts/env/*.lock). Both Dockerfiles run this.
#
#   docker/install.sh cpu|cuda [PYTHON [WHEEL]]    PYTHON: an interpreter with pip, default python3
#                                                  WHEEL: QaRL's wheel, default: this checkout
#
# TORCH_INDEX names another index for CPU builds of torch; empty: none, they come from UV_FIND_LINKS.
set -euo pipefail
device="${1:?cpu or cuda}" python="${2:-python3}"
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)" env="scripts/env/$1"
index="${TORCH_INDEX-https://download.pytorch.org/whl/cpu}" from=()
if [[ $device == cpu && -n $index ]]; then from=(--extra-index-url "$index" --index-strategy unsafe-best-match); fi
"$python" -m pip install --quiet --no-cache-dir uv
"$python" -m uv pip install --python "$python" --no-cache --constraint "$root/$env.lock" \
    --override "$root/$env.overrides.txt" ${from[@]+"${from[@]}"} "qarl-train[$device] @ file://${3:-$root}"
"$python" -m pip uninstall --quiet --yes uv
