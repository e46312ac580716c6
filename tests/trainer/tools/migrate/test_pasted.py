"""Every command that `migrate` prints is valid in bash, and the program gets its exact words."""

from __future__ import annotations

import pytest

from tests.trainer.tools.migrate.words import filled_in, migrated, pasted
from trainer.tools.migrate.systems import migrate
from trainer.tools.migrate.translation import shell_word

VERL = "python3 -m verl.trainer.main_ppo data.train_files=x actor_rollout_ref.model.path=y"
TRL = "trl grpo --model_name_or_path m --dataset_name a/b"
COMMANDS = [
    ("verl", f"""{VERL} data.val_files="['/a b/x.parquet', '/c/$y.parquet']" """),
    ("verl", f'{VERL} trainer.project_name="\'it is \\"$WHO\\" & co; rm -rf ~\'"'),
    ("trl", f"{TRL} --run_name 'two words, {{x}} and $HOME' --lora_target_modules q v --use_peft"),
    ("trl", "trl sft --model_name_or_path m --dataset_name a/b --packing --max_length 2048"),
]


@pytest.mark.parametrize(("system", "text"), COMMANDS)
def test_a_command_pasted_into_bash_has_the_same_words(system: str, text: str) -> None:
    done = migrated(system, text)
    values = {"WHO": "me", "ROW_TOKENS": "100", "y": "z"}
    variables = {name: values[name] for name in done.variables}
    expected = [
        word.replace("$((16384 / ROW_TOKENS))", "163") for word in filled_in(done, variables)
    ]
    assert not any("$((" in word for word in expected)
    assert pasted(done, values) == [done.program, *expected]


def test_only_variables_are_filled_in() -> None:
    assert shell_word("a=$X/$Y", ["X"]) == '"a=$X/\\$Y"'
    assert shell_word("a=$XY", ["X"]) == "'a=$XY'"
    assert shell_word("a=b", ["X"]) == "a=b"
    assert shell_word("a=['b', 'c']", []) == "\"a=['b', 'c']\""


def test_a_script_of_several_trainings_has_a_command_for_each() -> None:
    text = f"for n in 2 4; do {VERL} actor_rollout_ref.rollout.n=$n; done\n{VERL}\n{VERL}\n"
    text += "torchrun --nproc_per_node 2 -m verl.trainer.fsdp_sft_trainer data.train_files=x "
    text += "model.partial_pretrain=y\npip install x; python prepare.py a.b=1"
    commands = migrate("verl", text)
    assert [done.program for done in commands] == ["ppo", "ppo", "ppo", "sft"]
    assert [done.settings.get("actor_rollout_ref.rollout.n") for done in commands[:2]] == ["2", "4"]
    for done in commands:
        assert pasted(done, {}) == [done.program, *done.overrides()]
