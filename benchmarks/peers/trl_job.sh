#!/usr/bin/env bash
# The job of job.sh on TRL 1.16, with vLLM next to the trainer on each GPU; DEVICE=cpu uses transformers' generation
# instead. It runs on a CPU; it has not been run on GPUs yet. Every GPU holds the whole model; if it is too large, set
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
