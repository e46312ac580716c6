#!/usr/bin/env bash
# Measure the eight GPUs of a machine, in at most 20 minutes: FSDP2 over all of them, critic or rollout on their own GPUs,
# vLLM on two GPUs per engine, offloading, asynchronous training. Writes the same files as gpu.sh.
#   bash benchmarks/gpu_node.sh [--gpus 4]                  with Ray and vLLM if they are installed
#   bash benchmarks/gpu_node.sh --dry-run H100              check every run as if on eight such GPUs
#   bash benchmarks/gpu_node.sh --device cpu --tiny --gpus 2
exec bash "$(dirname "${BASH_SOURCE[0]}")/gpu.sh" --gpus 8 "$@"
