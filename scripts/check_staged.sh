#!/usr/bin/env bash
# Check the staged files, using only the locked environment: no file above 512 KiB, no merge marker, no stray space;
# lint, format and types of Python files. `--install` (make hooks) makes git run this before every commit.
set -euo pipefail
cd "$(git rev-parse --show-toplevel)"

if [[ "${1:-}" == --install ]]; then
    hook="$(git rev-parse --git-path hooks)/pre-commit"
    line='exec bash scripts/check_staged.sh'
    if [[ -e "$hook" ]] && ! grep -qF "$line" "$hook"; then
        echo "$hook exists and is not ours; add this line to it: bash scripts/check_staged.sh" >&2
        exit 1
    fi
    mkdir -p "$(dirname "$hook")"
    printf '#!/usr/bin/env bash\n%s\n' "$line" > "$hook"
    chmod +x "$hook"
    echo "installed $hook"
    exit
fi

bin="${QARL_ENV:-.venv}/bin"
most=$((512 * 1024))
mapfile -d '' -t files < <(git diff --cached --name-only --diff-filter=ACMR -z)
[[ ${#files[@]} -gt 0 ]] || exit 0
git diff --cached --check
python=()
for file in "${files[@]}"; do
    size="$(git cat-file -s ":$file")"
    if ((size > most)); then
        echo "$file: $size bytes are staged, at most $most are allowed; keep data out of the repository" >&2
        exit 1
    fi
    [[ "$file" != *.py ]] || python+=("$file")
done
[[ ${#python[@]} -gt 0 ]] || exit 0
"$bin/ruff" check "${python[@]}"
"$bin/ruff" format --check "${python[@]}"
"$bin/pyright" --pythonpath "$bin/python" "${python[@]}"
