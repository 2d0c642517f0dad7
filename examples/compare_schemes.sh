#!/usr/bin/env bash
# Train one seed in several schemes and print each export's held-out accuracy: compare_schemes.sh FOLDER "bf16 w4a16 w8a8" [OPTIONS]
set -euo pipefail
folder="$1"
schemes="$2"
shift 2

for scheme in $schemes; do
    qarl train --scheme "$scheme" --output "$folder/$scheme" --seed 0 "$@"
done
for scheme in $schemes; do
    qarl eval "$folder/$scheme" --problems 512 --json "$folder/$scheme.json"
done
