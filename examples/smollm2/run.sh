#!/usr/bin/env bash
# Train SmolLM2-135M-Instruct, a pretrained model, on two CPU cores:
#   bash examples/smollm2/run.sh grpo [key=value ...]        writes JSON objects: GRPO, 8 minutes
#   bash examples/smollm2/run.sh ppo [key=value ...]         the same by PPO with a critic
#   bash examples/smollm2/run.sh ppo_split [key=value ...]   the same on Ray, actor and critic in processes of their own
#   bash examples/smollm2/run.sh lora [key=value ...]        the same by GRPO on LoRA adapters
#   bash examples/smollm2/run.sh sft [key=value ...]         the same by SFT on the answers
#   bash examples/smollm2/run.sh agent [key=value ...]       calls a calculator, then answers
#   bash examples/smollm2/run.sh reward_model [key=value ...]   learns from pairs which sentence is kinder
#   bash examples/smollm2/run.sh preference [key=value ...]  GRPO on that reward model's scores
#   bash examples/smollm2/run.sh dpo [key=value ...]         DPO on the same pairs
# Settings go to the training: `trainer.seed=2`. RUN_DIR=<folder> sets the folder for all runs (default runs/smollm2),
# MODEL=<folder> another model, PYTHON a Python that has this project; without it, the script makes .venv and installs
# the project there. docs/smollm2.md shows the results.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source examples/stoppable.sh
which=${1:-}
here=examples/smollm2
run_dir=${RUN_DIR:-runs/smollm2}
model=${MODEL:-$run_dir/model}
data=$run_dir/data
case $which in
    grpo | ppo | ppo_split | lora | sft | agent | reward_model | preference | dpo) shift ;;
    *) sed -n '2,11p' "$0" | cut -c3- >&2; exit 2 ;;
esac
if [ -n "${PYTHON:-}" ]; then
    py=$PYTHON
else
    source tools/install.sh
    install_project dequantize,lora
fi
export TOKENIZERS_PARALLELISM=false
verl_like=("$py" -c "from trainer.cli.main import main; main()") # the command verl-like, of this Python and checkout
local=(trainer.backend=local trainer.n_gpus_per_node=1 trainer.device=cpu)

[ -e "$model/config.json" ] || "${verl_like[@]}" get smollm2 "$model"
"$py" $here/make.py "$data"

rl() { # <settings>: train the policy of `which`
    stoppable "${verl_like[@]}" ppo "${local[@]}" actor_rollout_ref.model.path="$model" \
        data.train_batch_size=8 actor_rollout_ref.actor.ppo_mini_batch_size=8 \
        actor_rollout_ref.rollout.n=8 actor_rollout_ref.rollout.temperature=0.7 \
        actor_rollout_ref.actor.optim.lr=1e-5 actor_rollout_ref.actor.optim.lr_warmup_steps=2 \
        trainer.total_training_steps=10 trainer.test_freq=5 trainer.save_every_minutes=null \
        trainer.default_local_dir="$run_dir/$which" "$@"
}
people=(
    reward=$here/rewards.py:person data.train_files="$data/people_train.jsonl" data.val_files="$data/people_val.jsonl"
    data.max_prompt_length=96 data.max_response_length=64
)
ppo=(algorithm=ppo "${people[@]}" critic.optim.lr=2e-5)
pairs=(
    data.train_files="$data/pairs_train.jsonl" data.val_files="$data/pairs_val.jsonl" data.max_length=128
    data.train_batch_size=16 optim.lr=1e-5 optim.lr_warmup_steps=2 trainer.total_epochs=1
)
make_pairs() { # the kinder and the less kind of four samples of the untrained model
    [ -e "$data/pairs_val.jsonl" ] && return
    "$py" -c "import vaderSentiment" 2>/dev/null || "$py" -m pip install -q vaderSentiment
    stoppable "${verl_like[@]}" eval "$model" "${local[@]}" data.val_files="$data/sentences_train.jsonl" \
        reward=$here/rewards.py:kindness data.max_prompt_length=64 data.max_response_length=48 \
        actor_rollout_ref.rollout.val_kwargs.n=4 actor_rollout_ref.rollout.val_kwargs.do_sample=true \
        actor_rollout_ref.rollout.val_kwargs.temperature=0.7 trainer.default_local_dir="$run_dir/samples"
    "$py" $here/make.py --pairs "$run_dir/samples" "$data"
}

case $which in
    grpo) rl algorithm=grpo "${people[@]}" "$@" ;;
    lora) rl algorithm=grpo "${people[@]}" actor_rollout_ref.model.lora_rank=16 actor_rollout_ref.actor.optim.lr=2e-4 "$@" ;;
    ppo) rl "${ppo[@]}" "$@" ;;
    ppo_split) rl "${ppo[@]}" trainer.backend=ray placement=split trainer.n_gpus_per_node=2 "$@" ;;
    sft)
        stoppable "${verl_like[@]}" sft "${local[@]}" model.path="$model" data.train_files="$data/people_sft.jsonl" \
            data.max_length=128 data.train_batch_size=32 optim.lr=1e-5 optim.lr_warmup_steps=2 \
            trainer.total_epochs=1 trainer.default_local_dir="$run_dir/sft" "$@"
        "${verl_like[@]}" eval "$run_dir/sft/model" "${local[@]}" "${people[@]:0:1}" "${people[@]:2}" \
            trainer.default_local_dir="$run_dir/sft/eval"
        ;;
    agent)
        if [ ! -e "$run_dir/agent_sft/model/config.json" ]; then # nine steps on the format of a call
            stoppable "${verl_like[@]}" sft "${local[@]}" model.path="$model" data.train_files="$data/shop_sft.jsonl" \
                data.max_length=192 data.train_batch_size=16 optim.lr=1e-5 trainer.total_epochs=3 \
                trainer.default_local_dir="$run_dir/agent_sft"
        fi
        rl algorithm=grpo actor_rollout_ref.model.path="$run_dir/agent_sft/model" \
            environment=$here/shop.py:Shop environment.max_tokens_per_turn=16 \
            data.train_files="$data/shop_train.jsonl" data.val_files="$data/shop_val.jsonl" \
            data.max_prompt_length=128 data.max_response_length=64 trainer.total_training_steps=20 "$@"
        ;;
    reward_model)
        make_pairs
        stoppable "${verl_like[@]}" reward-model "${local[@]}" model.path="$model" "${pairs[@]}" optim.lr=3e-5 \
            trainer.default_local_dir="$run_dir/reward_model" "$@"
        ;;
    dpo)
        make_pairs
        stoppable "${verl_like[@]}" dpo "${local[@]}" model.path="$model" "${pairs[@]}" \
            trainer.default_local_dir="$run_dir/dpo" "$@"
        ;;
    preference)
        scorer="{name: preference, kind: model, path: '$run_dir/reward_model/model'}"
        judge="{name: kindness, path: $here/rewards.py, function: kindness, weight: 0}" # measured, not trained with
        rl algorithm=grpo "reward.list=[$scorer, $judge]" \
            data.train_files="$data/sentences_train.jsonl" data.val_files="$data/sentences_val.jsonl" \
            data.max_prompt_length=64 data.max_response_length=48 "$@"
        ;;
esac
