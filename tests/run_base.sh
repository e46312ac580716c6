#!/usr/bin/env bash
# Run the README's first commands as a new user does: in a fresh clone, with the project and no extras.
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

(block,) = re.findall(r"^```python\n(from verl_like import GRPO\n.*?)^```", pathlib.Path("README.md").read_text(), re.M | re.S)
exec(block)
END
verl-like ppo algorithm=ppo actor_rollout_ref.model.path=sums/model data.train_files=sums/train.parquet \
    data.train_batch_size=32 data.max_prompt_length=16 data.max_response_length=4 \
    trainer.device=cpu trainer.n_gpus_per_node=2 placement=split trainer.total_training_steps=2
verl-like report runs/verl_like/ppo
