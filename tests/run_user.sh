#!/usr/bin/env bash
# In a fresh clone, install the project without extras and run the README's first commands. Then add
# the packages that the docs name beside ours, and run their tests.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
git clone -q . "$folder/clone"
cd "$folder/clone"
bash examples/quickstart/run.sh
source .venv/bin/activate
verl-like make-tiny sums --sums
python - <<'END'
import pathlib, re

text = pathlib.Path("README.md").read_text(encoding="utf-8")
run, estimator = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
exec(run)
pathlib.Path("my_algorithm.py").write_text(estimator, encoding="utf-8")
from my_algorithm import best_of_group

exec(run.replace("n=8,", 'n=8, algorithm={"adv_estimator": best_of_group},'))
END
verl-like ppo algorithm=ppo actor_rollout_ref.model.path=sums/model data.train_files=sums/train.parquet \
    data.train_batch_size=32 data.max_prompt_length=16 data.max_response_length=4 \
    trainer.device=cpu trainer.n_gpus_per_node=2 placement=split trainer.total_training_steps=2
verl-like report runs/verl_like/ppo

source tools/install.sh
install_or_exit pytest pytest-xdist hypothesis openai dspy langchain-openai litellm "lm-eval[hf]" smolagents
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
python -m pytest -q tests/workers/agents/test_gateway.py tests/trainer/tools/evaluation/test_lm_eval.py \
    -k "page_prints or lm_eval"
install_or_exit skypilot==0.14.1 # last, because it changes versions of other packages
python -m pytest -q tests/examples/test_cluster.py -k skypilot
