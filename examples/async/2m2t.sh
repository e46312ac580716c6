#!/usr/bin/env bash
# Two pairs of a generator and a trainer rank: the rank gets the generator's samples, and sends it the weights.
#   bash examples/async/2m2t.sh [key=value ...]
exec bash "$(dirname "${BASH_SOURCE[0]}")/run.sh" 2m2t "async_training.sample_routes=[[0,0],[1,1]]" "async_training.weight_routes=[[0,0],[1,1]]" "$@"
