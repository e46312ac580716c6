#!/usr/bin/env bash
# Measure one GPU, in at most 15 minutes: the LOCAL_RANK trap, the gpu tests, FSDP2, memory, MFU, hashing, sampling,
# copies, decoding, and three steps of GRPO and PPO with 0.5B. Writes gpu.json, gpu.md (to paste into an issue) and gpu.log.
#   bash benchmarks/gpu.sh --prepare            on a machine with a network: download packages that the GPU machine may lack
#                                               into .gpu-packages (12 MB); then copy the checkout with it to that machine
#   bash benchmarks/gpu.sh                      on the machine with the GPU; needs torch, transformers, pyarrow and pytest, but
#                                               no network, no Ray and no vLLM
#   bash benchmarks/gpu.sh --dry-run H100       check every run as if on such a GPU
#   bash benchmarks/gpu.sh --device cpu --tiny  run the same commands with small sizes on this machine
# Options are those of gpu_hour.py; gpu_node.sh is for several GPUs. PYTHON chooses the interpreter.
set -uo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root" || exit
py=${PYTHON:-$root/.venv/bin/python}
[ -x "$py" ] || py=$(command -v python3)
packages=$root/.gpu-packages
binary=(tensordict==0.15.3 pyvers==0.2.3 hydra-core==1.3.8 omegaconf==2.3.1 cloudpickle==3.1.2)
source_only=(antlr4-python3-runtime==4.9.3)

if [ "${1:-}" = --prepare ]; then
    set -e
    target=${PYTHON_VERSION:-3.12}
    "$py" -m pip install --no-deps --only-binary=:all: --python-version "$target" --upgrade --target "$packages" "${binary[@]}"
    "$py" -m pip install --no-deps --upgrade --target "$packages" "${source_only[@]}"
    echo "ready: $packages, for Python $target"
    exit
fi

# The packages come last on the path, so only those that the interpreter lacks are used.
site=$("$py" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}:$site:$packages TOKENIZERS_PARALLELISM=false
exec "$py" benchmarks/gpu_hour.py "$@"
