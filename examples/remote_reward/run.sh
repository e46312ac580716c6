#!/usr/bin/env bash
# PPO with rewards from a server over HTTP, and the same run with the reward in process, which must give the same numbers:
#   bash examples/remote_reward/run.sh [key=value ...]
# RUN_DIR=<folder> sets the folder of both runs (default runs/remote_reward), PYTHON the Python that has this project.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source examples/stoppable.sh
here=examples/remote_reward
py=${PYTHON:-.venv/bin/python}
[ -x "$py" ] || py=$(command -v python3)
run_dir=${RUN_DIR:-runs/remote_reward}
export TOKENIZERS_PARALLELISM=false

if ! "$py" -c "import trainer" 2>/dev/null; then
    echo "$py does not have this project: bash examples/quickstart/run.sh installs it into .venv, or set PYTHON=<a Python that has it>" >&2
    exit 1
fi
verl_like=("$py" -c "from trainer.cli.main import main; main()") # the command verl-like, of this Python and checkout

mkdir -p "$run_dir"
JUDGE_TOKEN=$("$py" -c "import secrets; print(secrets.token_hex(16))")
export JUDGE_TOKEN # a server that other machines can reach needs such a secret; one on this machine works without it

: >"$run_dir/server.log" # removes the address of an earlier server
"${verl_like[@]}" serve-reward --function "$here/judge.py:share_of_letter" --port 0 --token-env JUDGE_TOKEN >>"$run_dir/server.log" 2>&1 &
server=$!
trap 'kill "$server" 2>/dev/null && wait "$server" || true' EXIT # also after an error and after a signal
if [ ! -e "$run_dir/tiny/val.parquet" ]; then
    "$py" examples/tiny/make.py "$run_dir/tiny" >/dev/null 2>&1 # while the server starts
fi
until grep -q "answers at http" "$run_dir/server.log"; do
    if ! kill -0 "$server" 2>/dev/null; then
        echo "the reward server did not start:" >&2
        cat "$run_dir/server.log" >&2
        exit 1
    fi
    sleep 0.1
done
url=$(sed -n 's/.* answers at //p' "$run_dir/server.log")
echo "the reward server answers at $url (process $server)"

train() { # <folder of the run> <its rewards> [key=value ...]
    stoppable "${verl_like[@]}" ppo trainer.backend=local trainer.n_gpus_per_node=1 trainer.device=cpu trainer.resume_mode=disable \
        actor_rollout_ref.model.path="$run_dir/tiny/model" data.train_files="$run_dir/tiny/train.parquet" \
        data.train_batch_size=16 data.max_prompt_length=16 data.max_response_length=8 \
        algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=4 \
        actor_rollout_ref.actor.ppo_mini_batch_size=16 actor_rollout_ref.actor.optim.lr=2e-3 \
        trainer.total_training_steps=5 trainer.default_local_dir="$1" "reward.list=[$2]" "${@:3}"
}
train "$run_dir/remote" "{name: judge, kind: remote, url: '$url', token_env: JUDGE_TOKEN, batch_size: 16}" "$@"
train "$run_dir/in_process" "{name: judge, path: $here/judge.py, function: share_of_letter}" "$@" >"$run_dir/in_process.log" 2>&1 ||
    { cat "$run_dir/in_process.log" >&2; exit 1; }
"$py" "$here/compare.py" "$run_dir/remote" "$run_dir/in_process"
echo "report of the run that asked the server: $run_dir/remote/report.html"
