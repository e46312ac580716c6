#!/usr/bin/env bash
# Two makers for one trainer: where generation is the longer part. A maker that dies costs no sample.
#   bash examples/detached/2m1t.sh [key=value ...]
exec bash "$(dirname "${BASH_SOURCE[0]}")/run.sh" 2m1t detached.on_maker_loss=continue "$@"
