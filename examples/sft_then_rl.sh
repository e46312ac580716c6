# Example scripts that train by SFT and then by RL source this file from the repository's root, with `run_dir` and
# `here` (the example's folder) set. It sets `py`, `verl_like` and `common`, and writes the data with `$here/make.py`.
#   sft KEY=VALUE ...            trains $run_dir/sft, unless it has its model already
#   print_accuracies RUN LINE    prints LINE, a format, with the first and the last accuracy of a run
source examples/stoppable.sh
if [ -n "${PYTHON:-}" ]; then
    py=$PYTHON
else
    source tools/install.sh
    install_project
fi
export TOKENIZERS_PARALLELISM=false
verl_like=("$py" -c "from trainer.cli.main import main; main()") # the command verl-like, of this Python and checkout
common=(trainer.backend=local trainer.n_gpus_per_node=1 trainer.device=cpu)

if [ ! -e "$run_dir/data/val.parquet" ]; then
    mkdir -p "$run_dir"
    "$py" "$here/make.py" "$run_dir/data" 2>"$run_dir/make.log" || { cat "$run_dir/make.log" >&2; exit 1; }
fi

sft() {
    echo "== SFT"
    if [ -e "$run_dir/sft/model/config.json" ]; then
        echo "skipped, because $run_dir/sft has its model; remove that folder to repeat the step"
        return
    fi
    stoppable "${verl_like[@]}" sft "${common[@]}" model.path="$run_dir/data/model" \
        data.train_files="$run_dir/data/sft.parquet" trainer.default_local_dir="$run_dir/sft" "$@"
}

print_accuracies() {
    [ -s "$1/metrics.jsonl" ] || return 0 # no step was trained: a dry run
    "$py" -c '
import json, sys

name = "val-core/prompts/acc/mean@1"
lines = [json.loads(line) for line in open(sys.argv[1], encoding="utf-8")]
accuracies = [line[name] for line in lines if name in line]
print(sys.argv[2].format(accuracies[0], accuracies[-1]))
' "$1/metrics.jsonl" "$2"
}
