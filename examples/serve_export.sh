#!/usr/bin/env bash
# Serve a run's export over HTTP, ask it one question, stop the server: serve_export.sh RUN [PORT]
set -euo pipefail
run="$1"
port="${2:-8000}"
url="http://127.0.0.1:$port"
question='State the final answer to the following arithmetic problem: 17 + 25 ='

qarl serve "$run" --port "$port" &
server=$!
trap 'kill "$server" 2> /dev/null; wait "$server" || true' EXIT
until curl --silent --fail "$url/health"; do
    kill -0 "$server" # fails, and so ends the script, if the server has ended
    sleep 1
done
curl --silent --show-error --fail "$url/v1/chat/completions" --header 'Content-Type: application/json' --data "{
    \"model\": \"$(basename "$run")\", \"max_tokens\": 8, \"temperature\": 0,
    \"messages\": [{\"role\": \"user\", \"content\": \"$question\"}]
}"
