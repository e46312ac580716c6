"""The driver: hooks, failures, columns that it sends, passes that it skips, and samples."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.integration.rigged import NotedTrainer
from tests.integration.runs import calls, lines, numbers, overrides
from tests.waiting import wait_until_ended
from trainer import load_config, loop, run
from trainer.ppo.stages import PPOTrainer
from verl_like.batch.protocol import DataProto
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


class GrpoRun(NamedTuple):
    """Two steps of GRPO with validation, of a trainer that the configuration names."""

    folder: Path
    notes: list[str]
    batch: DataProto


@pytest.fixture(scope="module")
def grpo_run(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> GrpoRun:
    folder = tmp_path_factory.mktemp("grpo")
    cls = f"trainer.cls={RIGGED}.NotedTrainer"
    validation = (f"data.val_files={tiny_dir}/val.parquet", "trainer.test_freq=2")
    train(tiny_dir, folder, *GRPO, "trainer.total_training_steps=2", *validation, cls, trainer=None)
    return GrpoRun(folder, NotedTrainer.notes, NotedTrainer.batch)


def test_hooks_are_called_in_the_documented_order(grpo_run: GrpoRun) -> None:
    validate = ["validate_begin", "validate_end"]
    step = ["step_begin {}", "sample_begin", "sample_end 16"]
    expected = ["init_end", "train_begin", *validate]
    expected += [*[note.format(1) for note in step], "step_end 1"]
    expected += [*[note.format(2) for note in step], *validate, "step_end 2", "train_end"]
    assert grpo_run.notes == expected
    assert lines(grpo_run.folder)[-1]["mine"] == 42.0


def test_a_trainer_class_that_is_no_trainer_is_rejected(tiny_dir: Path, tmp_path: Path) -> None:
    cls = "trainer.cls=workers.roles.actor.ActorWorker"
    with pytest.raises(ConfigError, match=f"{cls} is not a subclass"):
        train(tiny_dir, tmp_path, *GRPO, cls, trainer=None)


def test_a_step_of_one_update_needs_no_pass_for_old_log_probs(
    tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = (*GRPO, "trainer.total_training_steps=2", ONE_STEP_PER_BATCH)
    without_pass, with_pass = tmp_path / "without", tmp_path / "with"
    train(tiny_dir, without_pass, *settings)
    assert calls(without_pass, "compute_log_prob") == []
    monkeypatch.setattr("trainer.ppo.scoring.update_computes_old_log_probs", lambda *_: False)
    train(tiny_dir, with_pass, *settings)
    assert len(calls(with_pass, "compute_log_prob")) == 2
    for metrics, expected in zip(numbers(without_pass), numbers(with_pass), strict=True):
        # the entropy of the drawn tokens without a pass, of the full distribution with one
        assert metrics.pop("actor/entropy") == pytest.approx(expected["actor/entropy"], rel=0.05)
        shared = {name: expected[name] for name in metrics}
        assert metrics == pytest.approx(shared, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(
    "setting",
    [
        "actor_rollout_ref.actor.ppo_epochs=2",
        "algorithm.use_kl_in_reward=true",
        "data.train_batch_size=16",
    ],
)
def test_old_log_probs_are_computed_if_the_update_cannot_compute_them(
    tiny_dir: Path, tmp_path: Path, setting: str
) -> None:
    train(tiny_dir, tmp_path, *GRPO, ONE_STEP_PER_BATCH, setting)
    assert len(calls(tmp_path, "compute_log_prob")) == 1


def test_grpo_runs_without_critic_and_reference(grpo_run: GrpoRun) -> None:
    last = lines(grpo_run.folder)[-1]
    roles = {call["cat"] for call in calls(grpo_run.folder, "init_model")}
    assert roles == {"actor", "rollout"}
    assert calls(grpo_run.folder, "update_critic") == []
    assert "critic/vf_loss" not in last
    assert "perf/overlap_ratio" in last
    versions = grpo_run.batch.batch["policy_version"]
    assert versions.tolist() == [2] * 16  # the first step samples with version 1


@pytest.mark.parametrize("weight", [0.0, 0.5])
def test_a_reward_model_and_rules_score_together(
    tiny_dir: Path, classifier: Path, tmp_path: Path, weight: float
) -> None:
    model = ("reward.model.enable=true", f"reward.model.path={classifier}")
    last = train(tiny_dir, tmp_path, *GRPO, *model, f"reward.function.weight={weight}")
    assert {e["cat"] for e in calls(tmp_path, "compute_rm_score")} == {"reward_model"}
    # a rule that weighs nothing is not called
    function_score = last["reward/function_score/mean"] if weight else 0.0
    total = weight * function_score + last["reward/model_score/mean"]
    assert last["critic/score/mean"] == pytest.approx(total, abs=1e-6)
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


def test_remax_subtracts_the_clipped_score_of_the_greedy_response(
    tiny_dir: Path, tmp_path: Path
) -> None:
    remax = ("algorithm.adv_estimator=remax", "algorithm.score_clip=0.05")
    prompts = f"data.train_files={tiny_dir}/train.parquet"  # some greedy responses have a score
    train(tiny_dir, tmp_path, *GRPO, *remax, prompts, "actor_rollout_ref.rollout.top_k=1")
    batch = NotedTrainer.batch.batch
    assert batch["token_level_scores"].abs().max() == pytest.approx(0.05)
    assert torch.equal(batch["reward_baselines"], batch["token_level_scores"].sum(-1))
    assert not batch["advantages"].any()  # every sample is greedy, so it is its own baseline

    train(tiny_dir, tmp_path / "sampled", *GRPO, *remax, prompts)
    assert len(calls(tmp_path / "sampled", "generate_sequences")) == 2
    assert torch.equal(NotedTrainer.batch.batch["reward_baselines"], batch["reward_baselines"])


def test_dynamic_sampling_fills_the_batch_with_groups_of_different_scores(
    tiny_dir: Path, tmp_path: Path
) -> None:
    dynamic = (
        "algorithm.filter_groups.enable=true",
        "algorithm.filter_groups.max_num_gen_batches=6",
    )
    last = train(tiny_dir, tmp_path, *GRPO, *dynamic, ONE_STEP_PER_BATCH)
    scores = NotedTrainer.batch.batch["token_level_scores"].sum(-1).view(8, 2)
    num_equal = int((scores[:, 0] == scores[:, 1]).sum())
    assert num_equal == last["dynamic_sampling/num_groups_of_equal_scores"]
    num_batches = len(calls(tmp_path, "generate_sequences"))
    assert last["dynamic_sampling/num_gen_batches"] == num_batches > 1
    assert len(set(NotedTrainer.batch.non_tensor_batch["uid"])) == 8


@pytest.mark.long
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
    settings = (
        *("placement=split", "trainer.n_gpus_per_node=2", f"trainer.backend={backend}"),
        *("timeouts.start_s=150", "timeouts.warn_s=0.02"),
        f"+role_workers.critic={RIGGED}.FailingCritic",
        f"+role_workers.actor={RIGGED}.FailingActor",
    )
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
