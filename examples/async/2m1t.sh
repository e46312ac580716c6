#!/usr/bin/env bash
# Two generators for one trainer: where generation is the longer part. A generator that dies costs no sample.
#   bash examples/async/2m1t.sh [key=value ...]
exec bash "$(dirname "${BASH_SOURCE[0]}")/run.sh" 2m1t async_training.on_generator_failure=continue "$@"
