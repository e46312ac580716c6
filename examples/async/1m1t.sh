#!/usr/bin/env bash
# One generator and one trainer: the next batch is generated while the trainer updates on the current one.
#   bash examples/async/1m1t.sh [key=value ...]
exec bash "$(dirname "${BASH_SOURCE[0]}")/run.sh" 1m1t "$@"
