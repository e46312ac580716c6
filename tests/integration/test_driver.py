"""The driver: hooks, failures, what it sends and skips, and the samples."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.rigged import NotedTrainer
from tests.integration.runs import calls, lines, numbers, overrides
from tests.waiting import wait_until_ended
from trainer import load_config, loop, run
from trainer.ppo.stages import PPOTrainer
from verl_like.errors import ConfigError

RIGGED = "tests.integration.rigged"
LOCAL = ("trainer.backend=local", "placement=colocate", "algorithm.use_kl_in_reward=false")
GRPO = (*LOCAL, "algorithm.adv_estimator=grpo", "trainer.total_training_steps=1")
ONE_STEP_PER_BATCH = "actor_rollout_ref.actor.ppo_mini_batch_size=8"


def train(
    tiny: Path, folder: Path, *more: str, trainer: type[PPOTrainer] | None = NotedTrainer
) -> dict[str, float]:
    """Run, and return the last line of metrics."""
    run(load_config(overrides(tiny, folder, *more)), trainer)
    return lines(folder)[-1]


def test_hooks_are_called_in_the_documented_order(tiny_dir: Path, tmp_path: Path) -> None:
    cls = f"trainer.cls={RIGGED}.NotedTrainer"
    validation = (f"data.val_files={tiny_dir}/val.parquet", "trainer.test_freq=2")
    last = train(
        tiny_dir, tmp_path, *GRPO, "trainer.total_training_steps=2", *validation, cls, trainer=None
    )
    validate = ["validate_begin", "validate_end"]
    step = ["step_begin {}", "sample_begin", "sample_end 16"]
    expected = ["init_end", "train_begin", *validate]
    expected += [*[note.format(1) for note in step], "step_end 1"]
    expected += [*[note.format(2) for note in step], *validate, "step_end 2", "train_end"]
    assert NotedTrainer.notes == expected
    assert last["mine"] == 42.0


def test_a_trainer_of_ones_own_must_be_one(tiny_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="trainer.cls=workers.roles.actor.ActorWorker is not a subclass"
    ):
        train(
            tiny_dir, tmp_path, *GRPO, "trainer.cls=workers.roles.actor.ActorWorker", trainer=None
        )


def test_a_step_of_one_update_needs_no_pass_for_old_log_probs(
    tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = (*GRPO, "trainer.total_training_steps=2", ONE_STEP_PER_BATCH)
    train(tiny_dir, tmp_path / "skipped", *settings)
    assert calls(tmp_path / "skipped", "compute_log_prob") == []
    monkeypatch.setattr("trainer.ppo.stages.policy_is_current", lambda *_: False)
    train(tiny_dir, tmp_path / "computed", *settings)
    assert len(calls(tmp_path / "computed", "compute_log_prob")) == 2
    for one, other in zip(
        numbers(tmp_path / "skipped"), numbers(tmp_path / "computed"), strict=True
    ):
        # of the drawn tokens where there is no pass, of the whole distribution where there is one
        assert one.pop("actor/entropy") == pytest.approx(other["actor/entropy"], rel=0.05)
        assert one == pytest.approx({name: other[name] for name in one}, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(
    "more",
    [
        "actor_rollout_ref.actor.ppo_epochs=2",
        "algorithm.use_kl_in_reward=true",
        "data.train_batch_size=16",
    ],
)
def test_old_log_probs_are_computed_where_the_first_pass_is_not_theirs(
    tiny_dir: Path, tmp_path: Path, more: str
) -> None:
    train(tiny_dir, tmp_path, *GRPO, ONE_STEP_PER_BATCH, more)
    assert len(calls(tmp_path, "compute_log_prob")) == 1


def test_grpo_runs_without_critic_and_reference(tiny_dir: Path, tmp_path: Path) -> None:
    last = train(tiny_dir, tmp_path, *GRPO, "trainer.total_training_steps=2")
    assert {
        e["cat"] for name in ("init_model", "update_critic") for e in calls(tmp_path, name)
    } <= {"actor", "rollout"}
    assert "critic/vf_loss" not in last
    assert "perf/overlap_ratio" in last
    versions = NotedTrainer.batch.batch["policy_version"]
    assert versions.tolist() == [2] * 16  # the first step samples with version 1


@pytest.mark.parametrize("weight", [0.0, 0.5])
def test_a_reward_model_scores_beside_the_rules(
    tiny_dir: Path, classifier: Path, tmp_path: Path, weight: float
) -> None:
    model = ("reward.model.enable=true", f"reward.model.path={classifier}")
    last = train(tiny_dir, tmp_path, *GRPO, *model, f"reward.function.weight={weight}")
    assert {e["cat"] for e in calls(tmp_path, "compute_rm_score")} == {"reward_model"}
    # a rule that weighs nothing is not called
    function_score = last["reward/function_score/mean"] if weight else 0.0
    parts = weight * function_score + last["reward/model_score/mean"]
    assert last["critic/score/mean"] == pytest.approx(parts, abs=1e-6)
    assert last["reward/model_score/mean"] != 0


@pytest.mark.parametrize("estimator", ["gae", "grpo", "optimal_token_baseline"])
def test_empty_responses_and_rows_without_eos_train(
    tiny_dir: Path, tmp_path: Path, estimator: str
) -> None:
    rigged = f"+role_workers.rollout={RIGGED}.TruncatingRollout"
    last = train(tiny_dir, tmp_path, *GRPO, rigged, f"algorithm.adv_estimator={estimator}")
    assert last["response/aborted_ratio"] == pytest.approx(3 / 8)
    assert last["response_length_non_aborted/clip_ratio"] == 1.0
    batch = NotedTrainer.batch.batch
    assert torch.isfinite(batch["advantages"]).all()
    assert batch["advantages"][batch["response_mask"] == 0].abs().sum() == 0


def test_remax_compares_with_the_score_of_the_greedy_answer(tiny_dir: Path, tmp_path: Path) -> None:
    train(
        tiny_dir,
        tmp_path,
        *GRPO,
        "algorithm.adv_estimator=remax",
        "actor_rollout_ref.rollout.top_k=1",
    )
    batch = NotedTrainer.batch.batch
    assert torch.equal(
        batch["reward_baselines"], batch["token_level_scores"].sum(-1)
    )  # all samples are greedy
    train(tiny_dir, tmp_path / "sampled", *GRPO, "algorithm.adv_estimator=remax")
    assert len(calls(tmp_path / "sampled", "generate_sequences")) == 2
    assert torch.equal(NotedTrainer.batch.batch["reward_baselines"], batch["reward_baselines"])


def test_remax_clips_baselines_as_the_scores_they_are_compared_with(
    tiny_dir: Path, tmp_path: Path
) -> None:
    clipped = ("algorithm.adv_estimator=remax", "algorithm.score_clip=0.05")
    scoring = f"data.train_files={tiny_dir}/train.parquet"  # greedy answers to some of these do
    train(tiny_dir, tmp_path, *GRPO, *clipped, scoring, "actor_rollout_ref.rollout.top_k=1")
    batch = NotedTrainer.batch.batch
    assert batch["token_level_scores"].abs().max() == pytest.approx(0.05)
    assert torch.equal(batch["reward_baselines"], batch["token_level_scores"].sum(-1))
    assert not batch["advantages"].any()  # every sample is its own baseline


def test_dynamic_sampling_fills_the_batch_with_groups_that_differ(
    tiny_dir: Path, tmp_path: Path
) -> None:
    dynamic = (
        "algorithm.filter_groups.enable=true",
        "algorithm.filter_groups.max_num_gen_batches=6",
    )
    last = train(tiny_dir, tmp_path, *GRPO, *dynamic, ONE_STEP_PER_BATCH)
    scores = NotedTrainer.batch.batch["token_level_scores"].sum(-1).view(8, 2)
    assert (
        int((scores[:, 0] == scores[:, 1]).sum())
        == last["dynamic_sampling/num_groups_of_equal_scores"]
    )
    assert (
        last["dynamic_sampling/num_gen_batches"] == len(calls(tmp_path, "generate_sequences")) > 1
    )
    assert len(set(NotedTrainer.batch.non_tensor_batch["uid"])) == 8


@pytest.mark.parametrize("backend", [pytest.param("ray", marks=pytest.mark.ray), "local"])
def test_a_failure_in_one_update_reports_both_and_leaves_no_orphan(
    tiny_dir: Path,
    tmp_path: Path,
    backend: str,
    request: pytest.FixtureRequest,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if backend == "ray":
        request.getfixturevalue("ray_session")
    broken = [
        f"+role_workers.{role}={RIGGED}.Failing{role.capitalize()}" for role in ("critic", "actor")
    ]
    settings = (
        "placement=split",
        "trainer.n_gpus_per_node=2",
        f"trainer.backend={backend}",
        *broken,
    )
    settings += ("timeouts.start_s=150", "timeouts.warn_s=0.02")
    with pytest.raises(FloatingPointError, match="the critic is broken") as caught:
        train(tiny_dir, tmp_path, *settings, trainer=PPOTrainer)
    notes = "\n".join(caught.value.__notes__)
    assert "critic.update_critic" in notes + str(caught.value)
    assert "the actor is broken too" in notes
    assert len(calls(tmp_path, "update_actor")) == 1  # it was waited for
    pids = {event["args"]["pid"] for event in calls(tmp_path, "init_model")} - {os.getpid()}
    assert len(pids) == (2 if backend == "ray" else 0)
    if backend == "ray":  # the overrides of `timeouts` are the groups' own limits
        assert re.search(
            r"start of critic: waiting for critic rank 0 .* \(limit 150 s\)", caplog.text
        )
    wait_until_ended(*pids)


def test_only_the_columns_that_a_method_reads_are_sent(
    tiny_dir: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    sent: dict[str, set[str]] = {}
    select = loop.select_reads

    def note(batch: Any, cls: type, method: str) -> Any:
        chosen = select(batch, cls, method)
        sent[method] = {*chosen.batch.keys(), *chosen.non_tensor_batch}
        return chosen

    monkeypatch.setattr(loop, "select_reads", note)
    train(tiny_dir, tmp_path, *LOCAL, "trainer.total_training_steps=1")
    assert "raw_prompt" not in set().union(*sent.values())
    assert sent["update_critic"] == {
        *("input_ids", "attention_mask", "position_ids", "responses", "response_mask"),
        *("uid", "sample_index", "values", "returns"),
    }
