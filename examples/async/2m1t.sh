#!/usr/bin/env bash
# Two generators for one trainer, for runs in which generation takes longer. If a generator dies, no sample is lost.
#   bash examples/async/2m1t.sh [key=value ...]
exec bash "$(dirname "${BASH_SOURCE[0]}")/run.sh" 2m1t async_training.on_generator_failure=continue "$@"
