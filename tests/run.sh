#!/usr/bin/env bash
# Run the tests. On a machine with only Python, this makes or repairs .venv and installs into it.
#   bash tests/run.sh                       all but long tests, and only some cases of tests with many
#   bash tests/run.sh all                   every case, as in CI
#   bash tests/run.sh [pytest arguments]    the tests that they select
# Tests marked `slow` run only when selected. run_vllm.sh and run_tinker.sh run those marked `vllm`
# and `tinker`; run_user.sh runs the README's first commands without the packages for tests.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONDONTWRITEBYTECODE # with it, pip would compile every file
source tools/install.sh
install_project dev
# Two libraries of environments, for the tests of their adapters. Reasoning Gym needs a C compiler;
# GEM pins versions of packages that its games do not need, so it comes without dependencies.
if command -v cc >/dev/null && ! "$py" -c 'import importlib.util as u, sys; sys.exit(not u.find_spec("gem"))'; then
    { uv_install reasoning-gym && uv_install --no-deps gem-llm; } 2>/dev/null ||
        say "no Reasoning Gym and no GEM: their tests are skipped"
    # Compiling them raises warnings, which would be errors in a test.
    "$py" -W ignore -c 'import reasoning_gym, gem' 2>/dev/null || true
fi

export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
sample=(--sample "$RANDOM")
if [ "$*" = all ]; then
    sample=()
elif [ $# -gt 0 ]; then
    exec "$py" -m pytest -q "$@"
else
    say "a sample of the cases; to repeat it: bash tests/run.sh ${sample[*]} -n 4"
fi
# Four processes for two cores, since some wait for their children: three left a tenth of the time
# unused.
"$py" -m pytest -q -n 4 --dist worksteal ${sample[@]+"${sample[@]}"} \
    -m "not ray and not example and not slow and not vllm and not tinker"
# On Ray, the tests of a file run in one process and share its cluster and groups. The files run in
# the order of the folders, longest first, so that both processes end together. Only files with
# such tests are collected, which saves seconds.
grep -rlE 'mark\.(ray|example)' --include='test_*.py' tests | sort |
    xargs "$py" -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder \
        ${sample[@]+"${sample[@]}"} -m "(ray or example) and not slow and not vllm"
