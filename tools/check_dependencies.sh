#!/usr/bin/env bash
# Resolve the two install commands of the docs, `pip install -e .` and, for GPUs,
# `pip install -e ".[vllm]"`, for Python 3.12 on Linux x86-64. Only metadata is downloaded.
# Fail unless both give the torch version that vLLM pins: otherwise the second would replace torch.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/install.sh
"$py" -m uv --version >/dev/null 2>&1 || "$py" -m pip install -qq uv
options=()
while read -r option; do options+=("$option"); done < <(index_options)

# Print the versions of torch and vLLM that a command installs; the arguments are passed to uv.
resolve() {
    "$py" -m uv pip compile -q --no-header --no-annotate --index-strategy unsafe-best-match \
        --python-version 3.12 --python-platform x86_64-unknown-linux-gnu \
        ${options[@]+"${options[@]}"} pyproject.toml "$@" | grep -E '^(torch|vllm)=='
}
plain=$(resolve)
with_vllm=$(resolve --extra vllm)
echo ".: $plain"
echo ".[vllm]: ${with_vllm//$'\n'/ }"
if [ "$plain" != "$(grep '^torch==' <<<"$with_vllm")" ]; then
    say "the two lines install different versions of torch; correct the bounds of torch in pyproject.toml"
    exit 1
fi
