#!/usr/bin/env bash
# Two makers and two trainers, in pairs: each maker's samples go to one trainer rank, which sends it the weights.
#   bash examples/detached/2m2t.sh [key=value ...]
exec bash "$(dirname "${BASH_SOURCE[0]}")/run.sh" 2m2t "detached.edges=[[0,0],[1,1]]" "detached.weight_edges=[[0,0],[1,1]]" "$@"
