#!/usr/bin/env bash
# Measure one GPU in two calls, next to the roofline's predictions. Needs Python 3.12 with torch 2.11 or later,
# transformers 5.17, pyarrow, xxhash and pytest; no network, no Ray, no vLLM and no flash-attn.
#   bash benchmarks/gpu.sh --prepare          on a machine with a network: writes .gpu-packages (12 MB), with the packages that
#                                             the GPU machine may lack and the predictions; copy the checkout with it
#   bash benchmarks/gpu.sh 1 --out FOLDER     on the machine with the GPU, at most 420 s
#   bash benchmarks/gpu.sh 2 --out FOLDER     at most 300 s
#   bash benchmarks/gpu.sh 1 --tiny           the same with small sizes on a CPU
# FOLDER gets figures.jsonl, a table (gpu.md) and gpu.log. PYTHON chooses the interpreter.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
root=$PWD
py=${PYTHON:-$root/.venv/bin/python}
[ -x "$py" ] || py=$(command -v python3)
packages=$root/.gpu-packages
binary=(tensordict==0.15.3 pyvers==0.2.3 cloudpickle==3.1.3 hydra-core==1.3.8 omegaconf==2.3.1)
source_only=(antlr4-python3-runtime==4.9.3)
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} TOKENIZERS_PARALLELISM=false

if [ "${1:-}" = --prepare ]; then
    set -e
    mkdir -p "$packages"
    "$py" benchmarks/gpu_run.py predict --out "$packages"
    target=${PYTHON_VERSION:-3.12}
    "$py" -m pip install -q --no-deps --only-binary=:all: --python-version "$target" --upgrade --target "$packages" "${binary[@]}"
    "$py" -m pip install -q --no-deps --upgrade --target "$packages" "${source_only[@]}"
    echo "ready: $packages, for Python $target"
    exit
fi

# The packages come last on the path, so only those that the interpreter lacks are used.
site=$("$py" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
export PYTHONPATH=$PYTHONPATH:$site:$packages
exec "$py" benchmarks/gpu_run.py "$@"
