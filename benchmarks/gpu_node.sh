#!/usr/bin/env bash
# What the eight GPUs of a machine make of this code, in at most 20 minutes: FSDP2 over all, critic or rollout on GPUs of
# their own, vLLM on two GPUs an engine, offloading, makers beside trainers. A table and a JSON, as of gpu.sh.
#   bash benchmarks/gpu_node.sh [--cards 4]                 Ray where it is installed, vLLM where it is
#   bash benchmarks/gpu_node.sh --dry-run H100              every run checked as on eight such cards, and none made
#   bash benchmarks/gpu_node.sh --device cpu --tiny --cards 2
exec bash "$(dirname "${BASH_SOURCE[0]}")/gpu.sh" --cards 8 "$@"
