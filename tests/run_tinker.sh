#!/usr/bin/env bash
# Run the tests with the unmodified tinker SDK and tinker-cookbook, in the environment .venv-tinker.
# It also sees the packages of .venv, so only the SDK and its own dependencies are installed.
#   bash tests/run_tinker.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/install.sh
install_project dev
sdk=.venv-tinker
if ! "$sdk/bin/python" -c 'import tinker' 2>/dev/null; then
    rm -rf "$sdk"
    "$py" -m venv "$sdk"
    "$py" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])' \
        >"$("$sdk/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/main.pth"
    "$sdk/bin/python" -m pip install -qq 'tinker==0.38.0' ||
        { say "the SDK could not be installed: its tests are skipped" && rm -rf "$sdk"; }
fi
if [ -d "$sdk" ] && ! "$sdk/bin/python" -c 'import tinker_cookbook, chz' 2>/dev/null; then
    # Without its dependency tml-renderers: no tested recipe imports it, and some indexes lack it.
    "$sdk/bin/python" -m pip install -qq --no-deps 'tinker-cookbook==0.6.1' &&
        "$sdk/bin/python" -m pip install -qq blobfile chz cloudpickle datasets math-verify pillow pylatexenc pyrage \
            sympy termcolor tiktoken tqdm 2>/dev/null ||
        say "the cookbook could not be installed: its tests are skipped"
fi
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
exec "$py" -m pytest -q -m "tinker and not slow" tests/trainer/serve "$@"
