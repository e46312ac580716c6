"""Commands that cannot be translated are rejected with the flag and the reason."""

from __future__ import annotations

import pytest

from tests.trainer.tools.migrate.words import migrated, translated_whole
from verl_like.errors import ConfigError

TRL = "trl grpo --model_name_or_path m --dataset_name a/b"
VERL = "python3 -m verl.trainer.main_ppo data.train_files=x actor_rollout_ref.model.path=y"
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
MOE = f"{ACTOR}.megatron.override_transformer_config"
REJECTED = {
    ("coati", "python mmmt_prompt.py"): {
        "--num_maker 2": "no flag --num_maker. Did you mean 'num_makers'",
        "--num_makers $N": r"--num_makers is '\$N'",
    },
    ("openrlhf", ""): {
        "python train.py --pretrain x": "there is no command of train_ppo_ray",
        "--pretran x": "no flag --pretran. Did you mean 'pretrain'",
        "--train_batch_size 10 --n_samples_per_prompt 4": "is 2.5, but must be a whole number of",
        "--train_batch_size $SIZE": r"--train_batch_size is '\$SIZE'",
        "--zero_stage 4": "--zero_stage 4: ZeRO has the stages 0 to 3",
        "--pretrain x --advantage_estimator rloo": "the translated command is incomplete",
    },
    ("openrlhf", "deepspeed --module openrlhf.cli.train_sft --dataset x"): {
        "--input_key prompt --output_key response": "apply it to the prompts",
        "--model.aux_loss_coef 0.1": "load-balancing loss of experts",
    },
    ("openrlhf", "deepspeed --module"): {
        "openrlhf.cli.train_rm --data.chosen_key better": "rename the column to chosen",
        "openrlhf.cli.train_dpo --optim lion": "OpenRLHF has adam and muon",
        "openrlhf.cli.train_kto --dataset x": "openrlhf.cli.train_kto cannot be translated",
    },
    ("trl", TRL): {
        "--num_generations 7": "an update of 8 completions is not a multiple of num_generations",
        "--per_device_train_batch_size $N": r"per_device_train_batch_size is '\$N'",
        "--config nowhere.yaml": "there is no such file",
        "--learning_rte 1": "no field --learning_rte. Did you mean 'learning_rate'",
    },
    ("trl", "python"): {
        "examples/scripts/tpo.py --model_name_or_path m": "tpo.py has no counterpart.*Triples",
        "examples/scripts/rloo.py": "names no model: it has its settings in its code.*`trl rloo`",
        "prepare.py --sft 1": r"no command of grpo, rloo, sft, reward, .*, orpo; .* 1\.$",
    },
    ("verl", VERL): {
        "data.unheard_of=1": "data.unheard_of=1: no such key is known here; remove it"
    },
    ("verl", "python"): {
        "train.py": "no command of main_ppo; the commands are: python train.py",
        "-m verl.trainer.sft_trainer engine=torchtitan model.path=y": "its optimizer and schedule",
        "-m recipe.spin.main_spin data.train_files=x": "main_spin is a driver with custom code",
        "-m verl.trainer.main_generation a=x": "main_generation is a driver with custom code",
    },
}
OTHER_EXPERIMENTS = {
    ("trl", TRL): {
        "--reward_weights 1 2": "weight of each reward in `reward.list`",
        "--max_tool_calling_iterations 3": r"environment.tools=\[FILE.py:FUNCTION\]",
        "--loss_type vespo": "--loss_type vespo: supported",
    },
    ("verl", VERL): {
        f"{ROLLOUT}.multi_turn.enable=True": "multi_turn.enable=True: set environment.tools",
        "data.video_key=clips": "videos are not supported",
        f"{MOE}.moe_aux_loss_coeff=0.1 {MOE}.moe_router_load_balancing_type=aux_loss": "moe_aux_"
        "loss_coeff=0.1: set actor_rollout_ref.actor.router_aux_loss_coef",
        f"{MOE}.moe_z_loss_coeff=0.001": "routers have no z-loss",
        "actor_rollout_ref.actor.megatron.dtype=float16": "set actor_rollout_ref.model.compute_dty",
        "trainer.project_name=${trainer.experiment_name}": "replace the variable with its value",
        f"{ROLLOUT}.n=": "rollout.n is empty: the script reads its value from",
        "reward_model.enable=True custom_reward_function.path=f.py": "calls the reward model's",
    },
}
EXPERIMENT = "(?s)without them the training would be another one.*"
CASES = [
    (system, f"{command} {flags}", f"{start}{words}")
    for start, tables in (("", REJECTED), (EXPERIMENT, OTHER_EXPERIMENTS))
    for (system, command), rows in tables.items()
    for flags, words in rows.items()
]


@pytest.mark.parametrize(("system", "line", "words"), CASES)
def test_a_command_that_cannot_be_translated_is_rejected(
    system: str, line: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        translated_whole(system, line)


def test_a_text_that_the_shell_cannot_read_is_rejected() -> None:
    with pytest.raises(ConfigError, match="unexpected EOF"):
        migrated("openrlhf", "--pretrain 'x")
