#!/usr/bin/env bash
# The project's test command: from a bare machine with only Python, make or repair .venv, install, run the tests.
#   bash tests/run.sh [pytest arguments]        without arguments: fast tests first, then those on Ray; `slow` ones are left out
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
py=.venv/bin/python
say() { echo "tests/run.sh: $*" >&2; }

recent() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

make_venv() {
    local candidate
    for candidate in ${PYTHON:-} python3 python3.13 python3.12 python3.11 python; do
        if recent "$candidate"; then
            rm -rf .venv
            "$candidate" -m venv .venv || { say "'$candidate -m venv' failed; install your system's python3-venv"; exit 1; }
            return
        fi
    done
    say "needs Python 3.11 or newer; found $(python3 --version 2>&1 || true). Set PYTHON=<path of a newer one>."
    exit 1
}

install_torch() {
    if "$py" -c 'import re, sys, torch; sys.exit(tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) < (2, 11))' 2>/dev/null; then
        return
    fi
    if nvidia-smi -L >/dev/null 2>&1; then
        "$py" -m pip install -qq "torch>=2.11"
    elif ! "$py" -m pip install -qq "torch==2.13.0+cpu" 2>/dev/null; then
        say "no CPU build torch==2.13.0+cpu where pip looks; installing torch==2.13.0 (on Linux with its CUDA packages: several GB)"
        "$py" -m pip install -qq "torch==2.13.0"
    fi
}

recent "$py" && "$py" -m pip --version >/dev/null 2>&1 || make_venv
export PIP_DISABLE_PIP_VERSION_CHECK=1
wanted="$root $("$py" -c 'import hashlib; print(hashlib.sha256(open("pyproject.toml", "rb").read()).hexdigest())')"
there='import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, ("torch", "ray", "tensordict", "pytest", "trainer"))))'
if [ "$(cat .venv/installed 2>/dev/null)" != "$wanted" ] || ! "$py" -c "$there"; then
    say "installing into .venv"
    install_torch
    "$py" -m pip install -qq -e ".[dev]"
    echo "$wanted" >.venv/installed
fi

export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
if [ $# -gt 0 ]; then
    exec "$py" -m pytest -q "$@"
fi
"$py" -m pytest -q -m "not ray and not slow"
"$py" -m pytest -q -m "ray and not slow"
