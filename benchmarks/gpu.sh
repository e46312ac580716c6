#!/usr/bin/env bash
# What one GPU makes of this code, in at most 20 minutes: the machine, the gpu tests, updates, a decode, GRPO and PPO steps
# of 0.5B and 7B. It ends in a table to paste into an issue, and a JSON.
#   bash benchmarks/gpu.sh --prepare            packages for it into .gpu-packages, where there is a network; the folder goes along
#   bash benchmarks/gpu.sh                      on the machine with the GPU; no network is needed, no Ray, no vLLM
#   bash benchmarks/gpu.sh --dry-run H100       every run checked as on such a card, and none made
#   bash benchmarks/gpu.sh --device cpu --tiny  the same way, small, on this machine
# Options are those of gpu_hour.py; gpu_node.sh is for several GPUs. PYTHON is the interpreter to take. A part that fails or
# is late does not stop the others; the exit code says that one did.
set -uo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root" || exit
py=${PYTHON:-$root/.venv/bin/python}
[ -x "$py" ] || py=$(command -v python3)
packages=$root/.gpu-packages
binary=(tensordict==0.15.3 pyvers==0.2.3 hydra-core==1.3.8 omegaconf==2.3.1 cloudpickle==3.1.2 pyarrow xxhash pytest pluggy iniconfig)
source_only=(antlr4-python3-runtime==4.9.3)

if [ "${1:-}" = --prepare ]; then
    set -e
    target=${PYTHON_VERSION:-3.12}
    "$py" -m pip install --no-deps --only-binary=:all: --python-version "$target" --upgrade --target "$packages" "${binary[@]}"
    "$py" -m pip install --no-deps --upgrade --target "$packages" "${source_only[@]}"
    echo "ready: $packages, for Python $target"
    exit
fi

# behind what the interpreter has of its own: only what it lacks is taken from there
site=$("$py" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}:$site:$packages TOKENIZERS_PARALLELISM=false
exec "$py" benchmarks/gpu_hour.py "$@"
