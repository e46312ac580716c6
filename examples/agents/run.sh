#!/usr/bin/env bash
# Train a tiny model to act in several turns, on two CPU cores, in about a minute each:
#   bash examples/agents/run.sh guess [key=value ...]         finds a number with hints; each turn has its own advantage
#   bash examples/agents/run.sh calculator [key=value ...]    calls a tool, then answers; GRPO
#   bash examples/agents/run.sh agent [key=value ...]         an agent that uses OpenAI's API (pip install openai)
# RUN_DIR=<folder> sets the run folder (default runs/agents/<which>), PYTHON the Python that has this project. Every call
# starts a new run. A folder with checkpoints, such as those of a stopped run, is rejected: remove them, or set
# trainer.resume_mode=auto to resume.
set -euo pipefail
which=${1:-}
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source examples/stoppable.sh
here=examples/agents
py=${PYTHON:-.venv/bin/python}
[ -x "$py" ] || py=$(command -v python3)
run_dir=${RUN_DIR:-runs/agents/$which}
rows=$run_dir/tiny/rows.jsonl
export TOKENIZERS_PARALLELISM=false

several_updates="actor_rollout_ref.actor.ppo_mini_batch_size=8 actor_rollout_ref.actor.ppo_epochs=2"
case $which in
    guess)
        settings=(
            environment=$here/guess.py:Guess environment.max_tokens_per_turn=1
            algorithm.adv_estimator=rloo_process actor_rollout_ref.actor.optim.lr=2e-3 $several_updates
            data.train_batch_size=32 data.max_prompt_length=8 data.max_response_length=24
            actor_rollout_ref.rollout.n=8 trainer.total_training_steps=75
        )
        ;;
    calculator)
        settings=(
            "tools=[$here/calculator.py:add]"
            reward=$here/calculator.py:reward
            actor_rollout_ref.actor.optim.lr=5e-4 $several_updates
            data.train_batch_size=32 data.max_prompt_length=16 data.max_response_length=32
            actor_rollout_ref.rollout.n=8 trainer.total_training_steps=30
        )
        ;;
    agent)
        rows=$run_dir/tiny/train.parquet
        settings=(
            environment=$here/agent.py:run
            actor_rollout_ref.actor.optim.lr=6e-3 actor_rollout_ref.actor.ppo_mini_batch_size=16
            data.train_batch_size=16 data.max_prompt_length=16 data.max_response_length=32
            actor_rollout_ref.rollout.n=4 trainer.total_training_steps=20
        )
        ;;
    *) echo "usage: bash $here/run.sh guess|calculator|agent [key=value ...]" >&2; exit 2 ;;
esac

needs=trainer
[ "$which" = agent ] && needs="openai, trainer"
if ! "$py" -c "import $needs" 2>/dev/null; then
    echo "$py does not have $needs: bash examples/quickstart/run.sh installs this project into .venv. The agent also needs: pip install openai" >&2
    exit 1
fi
verl_like=("$py" -c "from trainer.cli.main import main; main()") # the command verl-like, of this Python and checkout

if [ ! -e "$rows" ]; then
    mkdir -p "$run_dir"
    case $which in
        agent) "$py" examples/tiny/make.py "$run_dir/tiny" >/dev/null 2>&1 ;;
        *) "$py" $here/make.py "$which" "$run_dir/tiny" ;;
    esac
fi
if [ "$which" = agent ]; then
    "${verl_like[@]}" check-environment $here/agent.py:run --say abb bbb \
        --row '{"prompt": [{"role": "user", "content": "say b"}], "ground_truth": "b"}'
fi
stoppable "${verl_like[@]}" ppo algorithm=grpo "${settings[@]}" actor_rollout_ref.actor.use_kl_loss=false \
    trainer.backend=local trainer.n_gpus_per_node=1 trainer.device=cpu trainer.resume_mode=disable \
    actor_rollout_ref.model.path="$run_dir/tiny/model" data.train_files="$rows" \
    trainer.default_local_dir="$run_dir/run" "${@:2}"
