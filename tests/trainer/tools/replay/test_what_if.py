"""`verl-like replay --without` and `--blame`: what a step is without a sample."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from tests.integration.runs import lines, overrides
from trainer import load_config, run
from trainer.cli import replay as command
from trainer.observers.saved_batches import batch_file
from trainer.tools.replay.replay import replay
from trainer.tools.replay.what_if import (
    Blame,
    batch_numbers,
    estimate_without,
    sample_names,
    without_each,
)
from verl_like.batch.protocol import DataProto
from verl_like.errors import ConfigError
from workers.columns import read_column
from workers.rewards.weighted import SKIPPED

SETTINGS = (
    *("trainer.backend=local", "data.train_batch_size=4", "actor_rollout_ref.rollout.n=4"),
    *("trainer.total_training_steps=3", "trainer.save_freq=1", "trainer.max_ckpt_to_keep=null"),
    *("trainer.batch_steps_to_keep=3", "algorithm.adv_estimator=rloo"),
)


@pytest.fixture(scope="module")
def whole(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    run(load_config(overrides(tiny_dir, folder, *SETTINGS)))
    return folder


def update_batch(folder: Path, step: int = 2) -> DataProto:
    return DataProto.load_from_disk(batch_file(folder, step, "update"))


def test_the_others_advantages_are_those_of_a_step_without_the_sample(whole: Path) -> None:
    """Of RLOO's group of four, three remain, and each is compared with the mean of two."""
    batch = update_batch(whole)
    name = sample_names(batch)[5]
    uid = name.rpartition("/")[0]

    def estimate(rest: DataProto) -> tuple[DataProto, dict[str, float]]:
        from trainer.ppo.advantage_inputs import compute_advantage

        return compute_advantage(rest, "rloo"), {}

    scores = read_column(batch, "token_level_rewards").sum(1)
    changed, _ = estimate_without(estimate, batch, [name])
    assert sample_names(changed) == sample_names(batch)
    assert changed.non_tensor_batch[SKIPPED].tolist() == [float(row == 5) for row in range(16)]
    mask = read_column(changed, "response_mask") != 0
    mates = [n for n, other in enumerate(batch.non_tensor_batch["uid"]) if other == uid and n != 5]
    for row in mates:
        others = scores[[n for n in mates if n != row]].mean()
        advantages = read_column(changed, "advantages")[row][mask[row]]
        assert advantages.numpy() == pytest.approx(float(scores[row] - others), abs=1e-5)


def test_without_a_sample_only_its_group_and_the_update_change(whole: Path) -> None:
    name = sample_names(update_batch(whole))[5]
    replayed = replay(whole, 2, without=[name])
    columns = [line for line in replayed.differences if line.startswith("batch of update")]
    assert any("advantages differs in 4 of 16 rows" in line for line in columns)
    assert not [line for line in replayed.differences if line.startswith("batch of score")]
    assert any(line.startswith("actor/grad_norm: ") for line in replayed.what_if)
    assert "log-probs of the next step's samples" in replayed.what_if[-1]


def test_a_change_without_effect_leaves_the_next_log_probs_as_they_were(whole: Path) -> None:
    replayed = replay(whole, 2, changes={"trainer.total_training_steps": 4})
    assert " 0 of " in replayed.what_if[-1]


def test_the_last_step_has_no_next_log_probs(whole: Path) -> None:
    name = sample_names(update_batch(whole, 3))[0]
    assert "did not save" in replay(whole, 3, without=[name]).what_if[-1]


def test_an_unknown_sample_is_rejected(whole: Path) -> None:
    name = sample_names(update_batch(whole))[5]
    with pytest.raises(ConfigError, match=rf"no such sample.* Did you mean .*{name[:-1]}"):
        replay(whole, 2, without=[f"{name}9"])


def test_the_effects_on_the_gradient_are_those_of_its_parts(whole: Path) -> None:
    """|g| - |g - g_i| by products equals the norm of the gradient of the other rows."""
    blame = Blame()
    assert not replay(whole, 2, blame=blame).differences, "the step is as before"
    assert len(blame.effects) == 16
    assert math.isfinite(blame.total)
    sizes = [abs(effect.effect) for effect in blame.effects]
    assert sizes == sorted(sizes, reverse=True)

    class OfRest(Blame):
        """Measures the norm of the gradient of the other rows directly."""

        def loss_effects(self, group, role, batch, numbers):  # type: ignore[no-untyped-def]
            mask = read_column(batch, "response_mask") != 0
            counts = {"num_rows": int(mask.any(1).sum()), "num_tokens": int(mask.sum())}
            rows = torch.arange(len(batch))
            group.forward_backward(batch, "policy", counts)
            self.total = group.take_gradients()[0]["norm"]
            effects = []
            for row in rows.tolist():
                group.forward_backward(batch[rows != row], "policy", counts)
                effects.append(self.total - group.take_gradients()[0]["norm"])
            return effects

    directly = OfRest()
    replay(whole, 2, blame=directly)
    expected = {effect.name: effect.effect for effect in directly.effects}
    for effect in blame.effects:
        assert effect.effect == pytest.approx(expected[effect.name], abs=2e-5 * blame.total)


@pytest.mark.parametrize("metric", ["actor/pg_loss", "critic/score/mean", "actor/grad_norm"])
def test_the_total_is_the_metric_of_the_step(whole: Path, metric: str) -> None:
    """The step has one mini-batch, so its metrics are those of the whole batch."""
    blame = Blame(metric)
    replay(whole, 2, blame=blame)
    assert blame.total == pytest.approx(lines(whole)[1][metric], rel=1e-4, abs=1e-6)


def test_means_without_each_sample_come_from_one_look_at_each(
    whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, count = update_batch(whole), 0
    numbers, rows = batch_numbers(batch), torch.arange(len(batch))
    expected = [batch_numbers(batch[rows != row]) for row in rows]
    means = [name for name in numbers if name.endswith("mean")]
    assert {"critic/score/mean", "critic/advantages/mean"} <= {*means}

    def counted(batch: DataProto) -> dict[str, float]:
        nonlocal count
        count += len(batch)
        return batch_numbers(batch)

    monkeypatch.setattr("trainer.tools.replay.what_if.batch_numbers", counted)
    without = without_each(batch, means, numbers)
    assert count == len(batch)
    assert without == {
        name: pytest.approx([x[name] for x in expected], rel=1e-5, abs=1e-7) for name in means
    }
    assert without_each(batch, ["critic/score/max"], numbers) == {
        "critic/score/max": [x["critic/score/max"] for x in expected]
    }


def test_a_critic_s_gradient_can_be_blamed_too(tiny_dir: Path, tmp_path: Path) -> None:
    settings = (*SETTINGS, "algorithm.adv_estimator=gae", "trainer.total_training_steps=1")
    run(load_config(overrides(tiny_dir, tmp_path, *settings)))
    blame = Blame("critic/grad_norm")
    replay(tmp_path, 1, blame=blame)
    assert blame.total == pytest.approx(lines(tmp_path)[0]["critic/grad_norm"], rel=1e-3)


@pytest.mark.long
def test_gradients_of_two_ranks_have_the_effects_of_one(
    whole: Path, tiny_dir: Path, tmp_path: Path
) -> None:
    """Weights are sharded, and a single row is on one of the ranks."""
    settings = (*SETTINGS, "trainer.n_gpus_per_node=2", "trainer.total_training_steps=1")
    run(load_config(overrides(tiny_dir, tmp_path, *settings)))
    of_two, of_one = Blame(), Blame()
    replay(tmp_path, 1, blame=of_two)
    replay(whole, 1, blame=of_one, from_start=True)
    expected = {effect.name: effect.effect for effect in of_one.effects}
    assert of_two.total == pytest.approx(of_one.total, rel=1e-4)
    for effect in of_two.effects:
        assert effect.effect == pytest.approx(expected[effect.name], abs=1e-4 * of_one.total)


def test_an_unknown_metric_names_those_that_can_be_blamed(whole: Path) -> None:
    with pytest.raises(ConfigError, match=r"--blame actor/pg_los: .* Did you mean 'actor/pg_loss'"):
        replay(whole, 2, blame=Blame("actor/pg_los"))


def test_the_command_prints_the_samples_with_the_largest_effect(
    whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command.main([str(whole), "--step=2", "--blame"])
    shown = capsys.readouterr().out.splitlines()
    begin = next(n for n, line in enumerate(shown) if line.startswith("actor/grad_norm of step 2"))
    assert all("score " in line for line in shown[begin + 1 : begin + 11])
    assert shown[begin + 11].startswith("step 2: all ")
