#!/usr/bin/env bash
# Tests with the unmodified tinker SDK, which has an environment of its own: .venv-tinker, with the
# packages of .venv behind it, so that only the SDK and what it needs more are installed.
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
exec "$py" -m pytest -q -m "tinker and not slow" tests/trainer/serve "$@"
