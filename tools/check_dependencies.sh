#!/usr/bin/env bash
# Resolve the two lines that the docs give for an installation, `pip install -e .` and, on GPUs,
# `pip install -e ".[vllm]"`, for Python 3.12 on Linux x86-64. Nothing is downloaded but metadata.
# It fails unless both give the torch that vLLM pins: otherwise the second line would replace torch.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/install.sh
"$py" -m uv --version >/dev/null 2>&1 || "$py" -m pip install -qq uv
places=()
while read -r place; do places+=("$place"); done < <(pips_places)

# The versions of torch and vLLM that one line installs; its arguments are uv's.
resolve() {
    "$py" -m uv pip compile -q --no-header --no-annotate --index-strategy unsafe-best-match \
        --python-version 3.12 --python-platform x86_64-unknown-linux-gnu \
        ${places[@]+"${places[@]}"} pyproject.toml "$@" | grep -E '^(torch|vllm)=='
}
plain=$(resolve)
with_vllm=$(resolve --extra vllm)
echo ".: $plain"
echo ".[vllm]: ${with_vllm//$'\n'/ }"
if [ "$plain" != "$(grep '^torch==' <<<"$with_vllm")" ]; then
    say "the two lines install different versions of torch; correct the bounds of torch in pyproject.toml"
    exit 1
fi
