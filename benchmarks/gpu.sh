#!/usr/bin/env bash
# What one GPU makes of this code, in at most 20 minutes: the gpu tests, an update, a decode, a whole GRPO step.
#   bash benchmarks/gpu.sh --prepare            packages for it into .gpu-packages, where there is a network; the folder goes along
#   bash benchmarks/gpu.sh                      on the machine with the GPU, which needs torch and transformers and no network
#   bash benchmarks/gpu.sh --device cpu --tiny  the same way, small, on this machine
# No Ray and no vLLM are needed. PYTHON is the interpreter to take. A part that fails does not stop the others; the exit
# code says that one did.
set -uo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
py=${PYTHON:-$root/.venv/bin/python}
[ -x "$py" ] || py=$(command -v python3)
packages=$root/.gpu-packages
binary=(tensordict==0.15.3 pyvers==0.2.3 hydra-core==1.3.8 omegaconf==2.3.1 cloudpickle==3.1.2 pyarrow pytest pluggy iniconfig)
source_only=(antlr4-python3-runtime==4.9.3)

if [ "${1:-}" = --prepare ]; then
    set -e
    target=${PYTHON_VERSION:-3.12}
    "$py" -m pip install --no-deps --only-binary=:all: --python-version "$target" --upgrade --target "$packages" "${binary[@]}"
    "$py" -m pip install --no-deps --upgrade --target "$packages" "${source_only[@]}"
    echo "ready: $packages, for Python $target"
    exit
fi

device=cuda
tiny=
while [ $# -gt 0 ]; do
    case $1 in
        --device) device=$2; shift 2 ;;
        --tiny) tiny=--tiny; shift ;;
        *) echo "unknown: $1; see the head of $0" >&2; exit 2 ;;
    esac
done

# behind what the interpreter has of its own: only what it lacks is taken from there
site=$("$py" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}:$site:$packages TOKENIZERS_PARALLELISM=false
failed=()
ran() { # name, limit in seconds, command: what it was, whether it went well, how long it took
    local name=$1 limit=$2 began=$SECONDS
    shift 2
    printf '\n== %s\n' "$name"
    if timeout "$limit" "$@"; then
        echo "-- $name: ok, $((SECONDS - began)) s"
    else
        failed+=("$name")
        echo "-- $name: FAILED, $((SECONDS - began)) s"
    fi
}

if [ "$device" = cuda ]; then
    ran "gpu tests" 420 "$py" -m pytest -q -p no:cacheprovider -m gpu tests/workers
else
    printf '\n== gpu tests\n-- not run: they need a CUDA device\n'
fi
for part in update decode step; do
    ran "$part" 240 "$py" benchmarks/gpu_side.py "$part" --device "$device" $tiny
done

[ -z "$tiny" ] || echo "tiny: sizes of a trial; its figures say nothing of a GPU"
[ "$device" = cuda ] || echo "not run: everything above is of the CPU; no GPU was used"
[ ${#failed[@]} = 0 ] || { printf 'FAILED: %s\n' "${failed[@]}"; exit 1; }
