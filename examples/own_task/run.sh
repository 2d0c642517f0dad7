#!/usr/bin/env bash
# Train the embedded policy on your questions with your reward, then measure the export: run.sh RUN [OPTIONS OF qarl train]
# For another model add --model FOLDER; what its settings should be: docs/own-run.md.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
run="$1"
shift

qarl train --task "$here/questions.jsonl" --reward "$here/reward.py:reward" --output "$run" \
    --steps 20 --prompts 16 --eval.problems 8 "$@"
qarl eval "$run" --problems 8
