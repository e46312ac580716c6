#!/usr/bin/env bash
# One generator for two trainer ranks, for runs in which training takes longer. Rank 0 sends the weights.
#   bash examples/async/1m2t.sh [key=value ...]
exec bash "$(dirname "${BASH_SOURCE[0]}")/run.sh" 1m2t "$@"
