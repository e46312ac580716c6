#!/usr/bin/env bash
# The project's test command: from a bare machine with only Python, make or repair .venv, install,
# run the tests.
#   bash tests/run.sh                       the fast tests, then those on Ray and whole examples
#   bash tests/run.sh [pytest arguments]    what they choose
# Tests marked `slow` run only when they are chosen. run_vllm.sh and run_tinker.sh run those marked
# `vllm` and `tinker`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONDONTWRITEBYTECODE # or pip would compile every file, and the tests write it anyway
source tools/install.sh
install_project dev
# Environments that are played for real where they can be had: Reasoning Gym compiles two packages,
# and GEM pins others of those that are here (its games need none of them).
if command -v cc >/dev/null && ! "$py" -c 'import importlib.util as u, sys; sys.exit(not u.find_spec("gem"))'; then
    { uv_install reasoning-gym && uv_install --no-deps gem-llm; } 2>/dev/null ||
        say "no Reasoning Gym and no GEM: their tests are skipped"
    # Python warns of their code once, where it compiles it: in a test that would be an error.
    "$py" -W ignore -c 'import reasoning_gym, gem' 2>/dev/null || true
fi

export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
if [ $# -gt 0 ]; then
    exec "$py" -m pytest -q "$@"
fi
# Four processes take the fast tests on two cores: some wait for their children. Three of them left
# a tenth of idle cores unused.
"$py" -m pytest -q -n 4 --dist worksteal -m "not ray and not example and not slow and not vllm and not tinker"
# Of those on Ray a file stays in one process, whose cluster and groups its tests share.
# In the order of the folders: the longest files come first, so that both processes end together.
"$py" -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder \
    -m "(ray or example) and not slow and not vllm"
