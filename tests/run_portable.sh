#!/usr/bin/env bash
# Run the README's script, the commands and a sample of the tests as on a Mac: on Linux, in processes
# without Linux's facilities (tests/without_linux/sitecustomize.py says which).
#   bash tests/run_portable.sh [pytest arguments]    with arguments, only the tests that they select
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/install.sh
install_project dev
root=$PWD bin=$PWD/.venv/bin
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
if [ "$(uname)" = Linux ]; then
    # On a Mac, the folder for temporary files is behind a link, and its name has 49 characters.
    mkdir "$folder/private"
    export TMPDIR=$folder/zyxvpxvq6csfxvn_n000000000000 PYTHONPATH=$root/tests/without_linux
    ln -s private "$TMPDIR"
fi
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
tests() {
    (cd "$root" && "$bin/python" -m pytest -q -p no:cacheprovider \
        -m "not linux and not long and not ray and not example and not slow and not vllm and not tinker and not gpu" "$@")
}
if [ $# -gt 0 ]; then
    tests "$@"
    exit
fi

passed=0 failed=()
try() { # try NAME COMMAND ...: run a command, and show its output if it fails
    local name=$1
    shift
    if "$@" >"$folder/output" 2>&1; then
        passed=$((passed + 1))
    else
        failed+=("$name")
        echo "--- $name: $*"
        tail -n 40 "$folder/output"
    fi
}
rejects() { # rejects WORDS COMMAND ...: run a command that must fail with these words
    local words=$1
    shift
    if "$@"; then return 1; fi
    grep -qF "$words" "$folder/output"
}

mkdir "$folder/work"
cd "$folder/work"
"$bin/python" - "$root/README.md" <<'PY'
import re, sys
from pathlib import Path

run, estimator = re.findall(r"^```python\n(.*?)^```", Path(sys.argv[1]).read_text(encoding="utf-8"), re.M | re.S)
Path("grpo.py").write_text(run.replace("steps=60", "steps=4"), encoding="utf-8")
row = '{"prompt": [{"role": "user", "content": "What is 3 + 4?"}], "response": "7"}\n'
Path("sums.jsonl").write_text(16 * row, encoding="utf-8")
Path("my_algorithm.py").write_text(estimator, encoding="utf-8")
PY
keys=(
    trainer.backend=local actor_rollout_ref.model.path=sums/model data.train_files=sums/train.parquet
    data.train_batch_size=8 data.max_prompt_length=16 data.max_response_length=4
)
short=(trainer.total_training_steps=2 trainer.record=all)
try make-tiny "$bin/verl-like" make-tiny sums --sums
try README "$bin/python" grpo.py
try sft "$bin/verl-like" sft trainer.backend=local model.path=sums/model data.train_files=sums.jsonl \
    data.train_batch_size=8 trainer.total_training_steps=2
try ppo "$bin/verl-like" ppo algorithm=ppo "${keys[@]}" "${short[@]}" trainer.default_local_dir=runs/a
try "ppo with two processes" "$bin/verl-like" ppo algorithm=ppo "${keys[@]}" "${short[@]}" \
    trainer.n_gpus_per_node=2 placement=split trainer.default_local_dir=runs/b
try environment "$bin/verl-like" ppo algorithm=grpo "${keys[@]}" trainer.total_training_steps=1 \
    environment="$root/examples/agents/guess.py:Guess" data.max_response_length=16 environment.max_tokens_per_turn=2
try check "$bin/verl-like" check "${keys[@]}" reward="$root/examples/quickstart/reward.py:verify"
try check-loss "$bin/verl-like" check-loss my_algorithm.best_of_group
try bisect "$bin/verl-like" bisect runs/a runs/b
try "a model's programs" rejects "programs that a model writes run only on Linux" \
    "$bin/verl-like" check "${keys[@]}" reward=workers.rewards.code:run_tests
try report "$bin/verl-like" report runs/a
try export "$bin/verl-like" export runs/a trained
# The tests of what differs: processes, sandboxes, sockets, locks and files.
try "tests" tests tests/verl_like/process tests/verl_like/backends/test_rpc.py \
    tests/workers/rewards/test_scorer.py tests/workers/agents/test_host.py tests/workers/agents/test_router.py \
    tests/workers/training/checkpoints/test_background_copies.py tests/trainer/run_folder/test_lock.py tests/trainer/run_folder/test_checkpoint.py tests/trainer/api/test_rewards.py
echo "$passed passed, ${#failed[@]} failed${failed[*]+: ${failed[*]}}"
[ ${#failed[@]} -eq 0 ]
