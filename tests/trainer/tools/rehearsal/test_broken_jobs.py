"""A rehearsal finds a bug that a run would meet only after its models are loaded, or later.

The error is the one of the run, with a note about the phase of the rehearsal. Most of these jobs
pass `verl-like check`.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.trainer.tools.rehearsal.jobs import RECIPES, settings_of, with_config
from trainer import load_config
from trainer.launch import check
from trainer.tools.rehearsal import rehearse

GRPO = ("ppo", "algorithm=grpo")
LOSS = "actor_rollout_ref.actor.policy_loss.loss_mode"
OPTIMIZER = "actor_rollout_ref.actor.optim.optimizer"
FAST = {
    "a reward that lacks a column of later rows": (
        "unit",
        *GRPO,
        "reward=<file>:reward_of_first_rows",
    ),
    "a reward that lacks a column of one row of many": (
        "failed for 1 of .* rows with their ground truth",
        *GRPO,
        "reward=<file>:reward_of_all_rows_but_one",
        "data.train_files=<tiny>/train.parquet",
    ),
    "a loss that ignores the mask": (
        "unmasked_loss breaks (prompt_tokens|numbers_outside)",
        *GRPO,
        f"{LOSS}=<code>.unmasked_loss",
    ),
    "a trainer whose state does not load": (
        "running_mean",
        *GRPO,
        "trainer.cls=<code>.UnreadableState",
    ),
    "an optimizer whose state does not load": (
        "averages",
        *GRPO,
        f"{OPTIMIZER}=<code>.UnreadableSGD",
    ),
    "a reward whose entry cannot be written": (
        "'letters'",
        *GRPO,
        "reward=<file>:reward_with_a_set",
    ),
    "a reward whose entry for responses cannot be written": (
        "num_ignored",
        *GRPO,
        "reward=<file>:reward_with_an_error",
    ),
}
"""Job -> the words of its error, its recipe, and its settings."""
SLOW = {
    "a reward that expects one image": (
        "too many values to unpack",
        "images",
        "reward=<file>:reward_of_one_image",
    ),
    "a reward whose memory is full": ("cache", *GRPO, "reward=<file>:reward_with_memory"),
    "a reward that cannot read responses": (
        "invalid literal",
        *GRPO,
        "reward=<file>:reward_that_parses",
    ),
    "a reward of NaN": ("nan|NaN", *GRPO, "reward=<file>:reward_with_nan"),
    "a reward without a result": (*("None", *GRPO, "reward=<file>:reward_without_result"),),
    "a reward that does not know validation": (
        *("val", *GRPO, "reward=<file>:reward_of_training", "data.val_files=<tiny>/val.parquet"),
    ),
    "a loss of NaN": ("skipped|nan", *GRPO, f"{LOSS}=<code>.nan_loss"),
    "a loss of one row": ("shape|size", *GRPO, f"{LOSS}=<code>.loss_of_rows"),
    "an estimator of rows": (
        "too many indices",
        "ppo",
        "algorithm.adv_estimator=<code>.estimator_of_rows",
    ),
    "an optimizer whose step fails": ("buffer", *GRPO, f"{OPTIMIZER}=<code>.BrokenSGD"),
    "an actor that cannot resume": (
        *("stores nothing", *GRPO, "role_workers.actor=<code>.ForgetfulActor"),
    ),
    "a stage that fails": ("returns_of_mine", *GRPO, "trainer.cls=<code>.BrokenUpdate"),
    "a step that fails from the second on": (
        "of_last_step",
        *GRPO,
        "trainer.cls=<code>.BrokenSecondStep",
    ),
    "a hook after a step": ("min_of_all", *GRPO, "trainer.cls=<code>.BrokenStepEnd"),
    "a hook after a checkpoint": ("weights.pt", *GRPO, "trainer.cls=<code>.BrokenSaveEnd"),
    "a state that cannot be saved": (
        "JSON|json|pickle|function",
        *GRPO,
        "trainer.cls=<code>.UnsavableState",
    ),
    "an actor with a bug": ("no_such_column", *GRPO, "role_workers.actor=<code>.BrokenActor"),
    "an actor that cannot export": (
        "no Hugging Face format",
        *GRPO,
        "role_workers.actor=<code>.NoExport",
    ),
    "a critic of another width": (
        "_has_rows",
        "ppo",
        "role_workers.critic=<code>.BrokenCritic",
    ),
    "a rollout that cannot start": ("libmine", *GRPO, "role_workers.rollout=<code>.BrokenRollout"),
    "an environment that fails in a turn": (
        "division by zero",
        *GRPO,
        "environment=<file>:FailsInSecondTurn",
        "data.max_response_length=64",
    ),
    "an environment that lacks a column": ("board", *GRPO, "environment=<file>:NeedsAColumn"),
    "an environment with a reward of text": ("won", *GRPO, "environment=<file>:RewardOfText"),
    "LoRA on a layer that is not there": (
        *("q_projection", *GRPO, "actor_rollout_ref.model.lora_rank=4"),
        "actor_rollout_ref.model.target_modules=[q_projection]",
    ),
    "a vocabulary smaller than the tokenizer": (
        *("vocab|token", *GRPO, "actor_rollout_ref.model.path=<tmp>/small"),
        "actor_rollout_ref.model.random_init_seed=1",
    ),
    "a template that fails on a later row": (
        "no letter d",
        *GRPO,
        "actor_rollout_ref.model.path=<tmp>/template",
    ),
    "a preference loss of three sides": (
        "index 2|out of bounds",
        "dpo",
        "loss=<code>.preference_of_three",
    ),
    "a reward model's loss of one pair": (
        "too many indices|dimension",
        "reward-model",
        "loss=<code>.reward_model_loss",
    ),
    "a validation of SFT": (
        "val/nothing",
        "sft",
        "trainer.cls=<code>.BrokenValidation",
        "trainer.test_freq=1",
    ),
    "an asynchronous trainer": (
        "baseline",
        "async",
        "algorithm=grpo",
        "trainer.cls=<code>.BrokenAsync",
    ),
    "a folder that is a file": ("not writable", *GRPO, "trainer.default_local_dir=<file>/run"),
}
FOUND_BY_CHECK = {
    "LoRA on a layer that is not there",
    "a template that fails on a later row",
    "a folder that is a file",
}


def run_job(job: str, tiny: Path, folder: Path) -> tuple[Exception | None, Exception | None]:
    """Return the error of the check, and that of the rehearsal of a job that passes the check."""
    _, name, *more = {**FAST, **SLOW}[job]
    with_config(tiny, folder / "small", vocab_size=30)
    text = "{% if 'd' in messages[0].content[-1] %}{{ raise_exception('no letter d') }}{% endif %}"
    template = shutil.copytree(tiny / "model", folder / "template") / "chat_template.jinja"
    template.write_text(text + template.read_text(encoding="utf-8"), encoding="utf-8")
    try:
        config = load_config(settings_of(name, tiny, folder, *more), RECIPES[name])
        check(config)
    except Exception as error:  # noqa: BLE001 - a job may raise anything
        return error, None
    try:
        rehearse(config)
    except Exception as error:  # noqa: BLE001 - a job may raise anything
        return None, error
    return None, None


@pytest.mark.long
@pytest.mark.parametrize(
    "job", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def test_a_bug_is_found(job: str, tiny_dir: Path, tmp_path: Path) -> None:
    words = {**FAST, **SLOW}[job][0]
    of_check, of_rehearsal = run_job(job, tiny_dir, tmp_path)
    error = of_check or of_rehearsal
    assert error is not None, "neither the check nor the rehearsal found it"
    assert re.search(words, describe(error)), describe(error)
    if of_rehearsal is not None:
        assert "The rehearsal failed " in of_rehearsal.__notes__[-1]
    assert (of_check is not None) is (job in FOUND_BY_CHECK)


def describe(error: BaseException) -> str:
    """Return the messages of an error and of its causes."""
    texts: Sequence[str] = [f"{type(error).__name__}: {error}"]
    cause = error.__cause__
    return "\n".join([*texts, *([describe(cause)] if cause else [])])
