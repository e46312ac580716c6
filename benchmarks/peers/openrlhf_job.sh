#!/usr/bin/env bash
# The job of job.sh on OpenRLHF 0.11 (flags with sections), all models and vLLM on the same GPUs. Its flags are checked
# against OpenRLHF's sources; it has not been run on GPUs yet. More OpenRLHF flags can follow the script's name.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/job.sh"

flat_rows
export RAY_DEDUP_LOGS=0 # steps are read from the log, and Ray would leave out similar lines
run "$PYTHON" -m openrlhf.cli.train_ppo_ray \
    --algo.advantage.estimator group_norm \
    --algo.kl.init_coef 0 \
    --data.prompt_dataset "$out/prompts.jsonl" \
    --data.input_key prompt \
    --data.label_key ground_truth \
    --data.apply_chat_template \
    --data.max_len $((MAX_PROMPT + MAX_RESPONSE)) \
    --data.max_samples $((BATCH * STEPS)) \
    --rollout.batch_size "$BATCH" \
    --rollout.n_samples_per_prompt "$SAMPLES" \
    --rollout.max_new_tokens "$MAX_RESPONSE" \
    --train.batch_size $((MINI_BATCH * SAMPLES)) \
    --train.max_epochs "$EPOCHS" \
    --train.num_episodes 1 \
    --train.dynamic_batch_enable \
    --train.max_tokens_per_gpu "$PASS_TOKENS" \
    --train.seed "$SEED" \
    --train.colocate_all \
    --actor.model_name_or_path "$MODEL" \
    --actor.num_nodes 1 \
    --actor.num_gpus_per_node "$GPUS" \
    --actor.adam.lr "$LR" \
    --actor.adam.betas 0.9 0.999 \
    --actor.adam.weight_decay 0.01 \
    --actor.lr_scheduler constant \
    --actor.lr_warmup_ratio 0 \
    --actor.max_norm 1.0 \
    --actor.gradient_checkpointing_enable \
    --ds.zero_stage 3 \
    --ds.packing_samples \
    --ds.enable_sleep \
    --vllm.num_engines "$GPUS" \
    --vllm.tensor_parallel_size 1 \
    --vllm.gpu_memory_utilization "$ENGINE_MEMORY" \
    --vllm.enable_sleep \
    --reward.remote_url "$peers/reward.py" \
    --ckpt.path "$out/checkpoints" \
    --ckpt.output_dir "$out/model" \
    "$@"
report "$out/log.txt"
