#!/usr/bin/env bash
# DeepSeek-LLM-7B, PPO on GSM8K: actor, rollout and reference on one half of the GPUs, the critic on the other half.
#   bash run_deepseek7b_llm.sh [key=value ...]          eight GPUs, the model, the data
#   ... trainer.simulate=8xH100                          a dry run for eight H100s, without GPUs
#   TINY=1 bash run_deepseek7b_llm.sh [key=value ...]   the same dataflow with a tiny Llama on this machine's CPU
# MODEL and DATA are the paths of the model and the data; README.md maps the steps of the original example to this one.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
py=${PYTHON:-$root/.venv/bin/python}
[ -x "$py" ] || py=$(command -v python3)
MODEL=${MODEL:-deepseek-ai/deepseek-llm-7b-chat}
DATA=${DATA:-$HOME/data/gsm8k}

settings=(
    placement=split
    algorithm.adv_estimator=gae
    algorithm.use_kl_in_reward=true
    algorithm.kl_ctrl.kl_coef=0.001
    data.train_files="$DATA/train.parquet"
    data.val_files="$DATA/test.parquet"
    data.train_batch_size=1024
    data.max_prompt_length=512
    data.max_response_length=512
    actor_rollout_ref.model.path="$MODEL"
    actor_rollout_ref.model.enable_gradient_checkpointing=true
    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.ppo_mini_batch_size=256
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8
    actor_rollout_ref.ref.fsdp_config.param_offload=true
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.tensor_model_parallel_size=1
    actor_rollout_ref.rollout.gpu_memory_utilization=0.4
    critic.model.path="$MODEL"
    critic.model.enable_gradient_checkpointing=true
    critic.optim.lr=1e-5
    critic.ppo_micro_batch_size_per_gpu=8
    trainer.critic_warmup=0
    trainer.nnodes=1
    trainer.n_gpus_per_node=8
    trainer.total_epochs=15
    trainer.save_freq=-1
    trainer.test_freq=10
    trainer.device=auto
    trainer.default_local_dir=runs/split_placement/deepseek7b
    trainer.logger=[console,wandb]
)

has() { "$py" -P -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$1') is None)"; }

missing() {
    local cards wanted=8 engine=vllm setting
    for setting in "$@"; do
        case $setting in
            ray.address=*) wanted=0 ;;
            trainer.simulate=*) wanted=0 engine=elsewhere ;;
            trainer.n_gpus_per_node=[1-9]*) wanted=${setting#*=} ;;
            actor_rollout_ref.rollout.name=*) engine=${setting#*=} ;;
        esac
    done
    cards=$(nvidia-smi -L 2>/dev/null | wc -l || true)
    [ "$cards" -ge "$wanted" ] || echo "- $wanted GPUs: this machine has $cards. Fewer: trainer.n_gpus_per_node=<number>; a cluster: ray.address=<address>"
    [ "$engine" != vllm ] || has vllm || echo "- vLLM: $py has none. $py -m pip install 'vllm>=0.32,<0.33', or actor_rollout_ref.rollout.name=native"
    "$py" -P -c "import sys; from workers.models.folder import model_folder as at; sys.exit(not (at(sys.argv[1], weights=False) / 'config.json').is_file())" "$MODEL" 2>/dev/null ||
        echo "- the model: $MODEL is neither a folder with a config.json nor available from the Hugging Face Hub. Set MODEL=<its folder>"
    [ -f "$DATA/train.parquet" ] || echo "- the data: no $DATA/train.parquet. From GSM8K's JSONL files: python examples/data/prepare_gsm8k.py $DATA train.jsonl test.jsonl, or set DATA=<its folder>"
}

if ! has trainer; then
    echo "$py does not have this project: bash $root/examples/quickstart/run.sh installs it into .venv, or set PYTHON=<a Python that has it>" >&2
    exit 1
fi
if [ "${TINY:-0}" != 1 ]; then
    lacks=$(missing "$@")
    if [ -n "$lacks" ]; then
        printf 'This run lacks:\n%s\nThe same dataflow, small, on this machine: TINY=1 bash %s\n' "$lacks" "$0" >&2
        exit 1
    fi
    exec "$py" -m trainer.main_ppo "${settings[@]}" "$@"
fi

run_dir=${RUN_DIR:-runs/split_placement/tiny}
split=$run_dir/split colocate=$run_dir/colocate devices=2
others=(trainer.resume_mode=disable)   # and the user's settings, except folder and placement, which the colocated run sets
for setting in "$@"; do
    case $setting in
        trainer.default_local_dir=*) split=${setting#*=} colocate=${setting#*=}-colocate ;;
        trainer.n_gpus_per_node=*) devices=${setting#*=} ;;
        placement=* | resource_pool_spec* | role_mapping* | trainer.backend=*) ;;
        *) others+=("$setting") ;;
    esac
done
changes=(
    data.train_files="$run_dir/data/train.parquet"
    data.val_files="$run_dir/data/test.parquet"
    data.train_batch_size=256
    data.max_prompt_length=48
    data.max_response_length=8
    actor_rollout_ref.model.path="$run_dir/data/model"
    actor_rollout_ref.actor.optim.lr=1e-3
    actor_rollout_ref.actor.ppo_mini_batch_size=64
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32
    actor_rollout_ref.ref.fsdp_config.param_offload=null
    actor_rollout_ref.rollout.name=native
    critic.model.path="$run_dir/data/model"
    critic.optim.lr=1e-3
    critic.ppo_micro_batch_size_per_gpu=32
    "~actor_rollout_ref.rollout.tensor_model_parallel_size"   # only vLLM has it
    "~actor_rollout_ref.rollout.gpu_memory_utilization"
    trainer.n_gpus_per_node=2
    trainer.device=cpu
    trainer.total_epochs=3
    trainer.default_local_dir="$split"
    trainer.logger=[console]
)
echo "TINY=1 changes these keys, and nothing else:"
for change in "${changes[@]}"; do
    for setting in "${settings[@]}"; do
        if [ "${setting%%=*}" = "${change%%=*}" ]; then echo "  ${change%%=*}: ${setting#*=} -> ${change#*=}"; fi
        if [ "~${setting%%=*}" = "$change" ]; then echo "  ${change#?}: ${setting#*=} -> unset"; fi
    done
done
export TOKENIZERS_PARALLELISM=false
source "$root/examples/stoppable.sh"
echo "Make a tiny chat model, fine-tuned until it solves about a third of the sums:"
"$py" "$root/examples/tiny/make_gsm8k.py" "$run_dir/data" 2>/dev/null
"$py" "$root/examples/data/prepare_gsm8k.py" "$run_dir/data" "$run_dir/data/train.jsonl" "$run_dir/data/test.jsonl"
stoppable "$py" -m trainer.main_ppo "${settings[@]}" "${changes[@]}" trainer.resume_mode=disable "$@"
echo "Repeat the first steps with all roles on one pool, to measure actor and critic one after the other, and to compare the numbers:"
stoppable "$py" -m trainer.main_ppo "${settings[@]}" "${changes[@]}" placement=colocate trainer.total_training_steps=5 \
    trainer.n_gpus_per_node=$(((devices + 1) / 2)) trainer.backend=local trainer.default_local_dir="$colocate" "${others[@]}"
"$py" "$here/compare.py" "$split" "$colocate"
