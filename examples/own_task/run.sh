#!/usr/bin/env bash
# Train the embedded policy on your questions with your reward, then measure the export: run.sh RUN --steps 20 [MORE OPTIONS]
# For another model add --model FOLDER; docs/guide/own-run.md explains which settings it needs.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
run="$1"
shift

qarl train --task "$here/questions.jsonl" --reward "$here/reward.py:reward" --output "$run" \
    --prompts 16 --eval.problems 8 "$@"
qarl eval "$run" --problems 8
