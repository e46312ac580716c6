#!/usr/bin/env bash
# The job of job.sh on TRL 1.16, with vLLM beside the trainer on each card; DEVICE=cpu takes transformers' generation in its
# place. It runs on a CPU; it has not been run on cards yet. Every card holds the whole model: for one that is too large, give
# ACCELERATE="--config_file zero3.yaml".
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/job.sh"

flat_rows
read -ra launcher <<<"${ACCELERATE:-}"
launcher=(-m accelerate.commands.launch --num_processes "$GPUS" "${launcher[@]}")
[ "$DEVICE" = cuda ] || launcher=()
run "$PYTHON" "${launcher[@]}" "$peers/trl_job.py" \
    --model "$MODEL" \
    --prompts "$out/prompts.jsonl" \
    --batch "$BATCH" \
    --mini-batch "$MINI_BATCH" \
    --samples "$SAMPLES" \
    --epochs "$EPOCHS" \
    --steps "$STEPS" \
    --max-response "$MAX_RESPONSE" \
    --max-length $((MAX_PROMPT + MAX_RESPONSE)) \
    --pass-samples "$PASS_SAMPLES" \
    --lr "$LR" \
    --seed "$SEED" \
    --gpus "$GPUS" \
    --device "$DEVICE" \
    --engine-memory "$ENGINE_MEMORY" \
    --out "$out" \
    "$@"
report "$out/steps.jsonl"
