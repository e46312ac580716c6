# The other scripts in this folder source it: one job for four frameworks, defined by environment variables.
#   MODEL=Qwen/Qwen2.5-0.5B-Instruct PROMPTS=train.parquet GPUS=8 bash benchmarks/peers/verl_job.sh
#   PRINT=1 ... prints the framework's command, quoted for a shell, and runs nothing
# GRPO without KL: STEPS steps of BATCH prompts with SAMPLES responses each; updates of MINI_BATCH prompts, EPOCHS times over
# the samples. The reward is 1 if a response contains the row's ground truth (reward.py): cheap, and equal for all frameworks.
: "${MODEL:?MODEL: a model folder in the format of Hugging Face}"
: "${PROMPTS:?PROMPTS: a parquet file with the columns prompt (messages) and reward_model (with ground_truth)}"
framework=$(basename "$0" _job.sh)
peers=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export MODEL PROMPTS
export BATCH=${BATCH:-1024} MINI_BATCH=${MINI_BATCH:-256} SAMPLES=${SAMPLES:-4} EPOCHS=${EPOCHS:-1} STEPS=${STEPS:-6}
export MAX_PROMPT=${MAX_PROMPT:-512} MAX_RESPONSE=${MAX_RESPONSE:-1024}
export LR=${LR:-1e-6} SEED=${SEED:-1}
export GPUS=${GPUS:-8} DEVICE=${DEVICE:-cuda}
PASS_TOKENS=${PASS_TOKENS:-16384} # tokens per pass and GPU, where a framework limits tokens
PASS_SAMPLES=${PASS_SAMPLES:-8}   # samples per pass and GPU, where it limits samples (TRL)
ENGINE_MEMORY=${ENGINE_MEMORY:-0.5} # fraction of a GPU's memory that vLLM takes
PYTHON=${PYTHON:-python3}           # the Python with the framework
out=$(realpath -m "${OUT:-runs/bench/$framework}")
[ -n "${PRINT:-}" ] || mkdir -p "$out"

# Run a command, or print it if PRINT is set. The command and its output are also written to files.
run() {
    local command
    command=$(printf '%q ' "$@")
    if [ -n "${PRINT:-}" ]; then
        echo "$command"
        exit
    fi
    echo "$command" >"$out/command.txt"
    "$@" 2>&1 | tee "$out/log.txt"
}

# Write the rows as JSON lines with the fields prompt and ground_truth, as many as the job needs.
flat_rows() { [ -n "${PRINT:-}" ] || "$PYTHON" "$peers/record.py" rows "$out/prompts.jsonl"; }

# Print the table's row, and write the JSON, from the framework's log.
report() { "$PYTHON" "$peers/record.py" "$framework" "$1" "$out/bench.json"; }
