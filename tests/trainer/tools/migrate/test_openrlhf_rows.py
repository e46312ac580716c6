"""OpenRLHF's commands on rows: SFT, reward models, DPO."""

from __future__ import annotations

import pytest

from tests.trainer.tools.migrate.words import (
    composed,
    migrated,
    notes,
    translated,
    translated_whole,
)
from trainer.tools.migrate.translation import Table

HEREDOC = """
read -r -d '' training_commands <<EOF
openrlhf.cli.{program} \\
   --data.dataset rows.jsonl --model.model_name_or_path m --train.batch_size 256 \\
   --train.micro_batch_size 2 --data.max_samples 1000 --ds.zero_stage 3 --ds.packing_samples \\
   --adam.lr 5e-6 {flags}
EOF
if [[ ${{1}} != "slurm" ]]; then
    deepspeed --num_gpus 4 --module $training_commands
fi
"""


def test_sft_counts_rows_and_samples_as_in_openrlhf() -> None:
    flags = "--data.input_key question --data.output_key response --train.max_epochs 2"
    done = migrated("openrlhf", HEREDOC.format(program="train_sft", flags=flags))
    config = composed(done)
    assert (done.program, config.data.train_batch_size, config.optim.lr) == ("sft", 256, 5e-6)
    assert (config.data.use_dynamic_bsz, config.data.micro_batch_size_per_gpu) == (False, 2)
    assert (config.trainer.total_epochs, config.trainer.total_training_steps) == (2, 8)
    assert (config.trainer.n_gpus_per_node, config.model.strategy) == (4, "fsdp")
    assert (config.optim.lr_scheduler_type, config.optim.min_lr_ratio) == ("cosine", 0.1)
    columns = "--input_key question, --output_key response: rows have the columns prompt, response"
    assert columns in "\n".join(done.absent)


def test_muon_has_the_rates_of_both_groups() -> None:
    flags = "--optim muon --muon.lr 0.01 --muon.ns_steps 5"
    optim = composed(migrated("openrlhf", HEREDOC.format(program="train_rm", flags=flags))).optim
    assert (optim.optimizer, optim.lr, optim.args) == ("Muon", 5e-6, {"matrix_lr": 0.01})


def test_a_chat_template_may_be_applied_to_prompts() -> None:
    columns = "--input_key prompt --output_key response --apply_chat_template"
    line = f"deepspeed --module openrlhf.cli.train_sft --dataset x --pretrain m {columns}"
    translated_whole("openrlhf", line)


def test_reward_models_and_preferences_are_translated() -> None:
    done = migrated("openrlhf", HEREDOC.format(program="train_rm", flags="--data.max_len 4096"))
    assert (done.program, composed(done).data.max_length) == ("reward-model", 4096)
    flags = "--model.beta 0.2 --model.ipo_enable --model.nll_loss_coef 0.1"
    config = composed(migrated("openrlhf", HEREDOC.format(program="train_dpo", flags=flags)))
    assert (config.loss, config.beta, config.sft_coef) == ("ipo", 0.2, 0.1)


@pytest.mark.parametrize("program", ["train_sft", "train_rm", "train_dpo"])
def test_every_flag_is_described(program: str) -> None:
    values = {"zero_stage": "3", "lr_scheduler": "constant", "input_key": "x"}
    for name, row in Table("openrlhf_rows", "all", program).rows.items():
        flag = (row.new or name).replace("*", "lr")
        value = values.get(name, "1")
        done = translated("openrlhf", f"deepspeed --module {program} --{flag} {value}")
        assert any(flag in line for line in notes(done)) or name in ("input_key", "output_key"), (
            flag
        )
