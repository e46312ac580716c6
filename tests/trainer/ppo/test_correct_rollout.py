"""The driver's correction of a whole batch, its rules between keys, and its presets."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import load
from tests.integration.runs import FEW_ROWS, POLICY_ALONE, calls, lines, overrides
from tests.workers.kept_ranks import run_kept
from tests.workers.samples import learned, make_batch, own_chunk, started, tiny_config
from trainer import load_config, run
from trainer.config.keys import value_at
from trainer.config.unused_keys import unused_reason
from trainer.ppo.config import PPOConfig
from trainer.ppo.filters import active_filters, correct_rollout
from trainer.ppo.recipe import PPO
from verl_like.batch.protocol import DataProto
from verl_like.config_key import replace_keys
from verl_like.errors import ConfigError
from workers.config import RolloutCorrectionConfig
from workers.roles.actor import ActorWorker
from workers.roles.critic import CriticWorker

NEEDED = ("data.train_files=x", "actor_rollout_ref.model.path=y", "trainer.backend=local")
SECTION = "algorithm.rollout_correction"
PRESETS = PPO.preset_names("correction")
CARDS = load("docs/cards.py")
PRESETS_OF_DIFFERENT_KEYS = {
    frozenset(CARDS.preset_leaves("correction", p)): p for p in PRESETS
}.values()
"""One preset of each set of keys."""
REJECTING: dict[str, Any] = {
    "rollout_is": "sequence",
    "rollout_is_batch_normalize": True,
    "rollout_rs": "token_k2,seq_mean_k1",
    "rollout_rs_threshold": "0.02,0.9_1.1",
}
BYPASS = REJECTING | {
    "rollout_is_batch_normalize": False,
    "bypass_mode": True,
    "loss_type": "reinforce",
}


def sampled(num_rows: int = 8) -> DataProto:
    """Return rows whose behavior policy is a little off, and one row that is far off."""
    batch = make_batch(num_rows)
    noise = torch.randn(num_rows, 5, generator=torch.Generator().manual_seed(1))
    noise[0] -= 9.0
    batch.batch["rollout_log_probs"] = batch.batch["old_log_probs"] + 0.1 * noise
    return batch


def config_of(**settings: Any) -> PPOConfig:
    correction = RolloutCorrectionConfig(**settings)
    return replace_keys(PPOConfig(), {"algorithm.rollout_correction": correction})


def test_the_corrected_batch_has_weights_and_a_shorter_mask() -> None:
    batch = sampled()
    mask = batch.batch["response_mask"].clone()
    corrected, metrics = correct_rollout(batch, config_of(**REJECTING), 1)
    assert torch.equal(batch.batch["response_mask"], mask), "the sampled tokens stay recorded"
    assert "rollout_is_weights" not in batch.batch.keys()

    shorter = corrected.batch["response_mask"]
    assert shorter[0].sum() == 0, "the row that is far off"
    assert (shorter <= mask).all()
    fraction = 1 - shorter.sum().item() / mask.sum().item()
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(fraction)

    filled = mask.any(-1)
    assert corrected.batch["rollout_is_weights"].amax(-1)[filled].mean() == pytest.approx(1.0)
    assert metrics["rollout_corr/rollout_is_batch_norm_factor"] != 1.0


def test_weights_use_the_truncated_log_probs_of_the_rollout() -> None:
    batch = sampled()
    batch.batch["rollout_truncated_log_probs"] = batch.batch["old_log_probs"] - math.log(1.5)
    corrected, _ = correct_rollout(batch, config_of(rollout_is="token"), 1)
    inside = batch.batch["response_mask"].bool()
    weights = corrected.batch["rollout_is_weights"][inside]
    torch.testing.assert_close(weights, torch.full_like(weights, 1.5))


@pytest.mark.parametrize(
    "settings", [{}, {"bypass_mode": True, "rollout_rs": "token_k1", "rollout_rs_threshold": "2"}]
)
def test_there_is_no_filter_without_a_correction_and_with_a_bypass(
    settings: dict[str, Any],
) -> None:
    assert "algorithm.rollout_correction" not in active_filters(config_of(**settings))


def learned_on_ranks(tiny_dir: Path, num_rows_a_pass: int) -> list[dict[str, float]]:
    """Return the metrics of a corrected update of actor and critic, then those of a bypass."""
    updates = []
    for role, settings in (
        (ActorWorker, REJECTING),
        (CriticWorker, REJECTING),
        (ActorWorker, BYPASS),
    ):
        config = tiny_config(
            tiny_dir,
            ppo_mini_batch_size=4,
            ppo_epochs=2,
            ppo_micro_batch_size_per_gpu=num_rows_a_pass,
            loss_agg_mode="seq-mean-token-mean",
        )
        config.algorithm.rollout_correction = RolloutCorrectionConfig(**settings)
        batch = sampled()
        for sample_filter in active_filters(config_of(**settings)).values():
            batch, _ = sample_filter.apply(batch, config_of(**settings), 1)
        worker = started(role, config, 10)
        data = own_chunk(batch, worker.rank, worker.world_size)
        update = worker.update_actor if role is ActorWorker else worker.update_critic
        updates.append(learned(update(data)))
    return updates


def test_corrected_updates_do_not_depend_on_ranks_and_micro_batches(tiny_dir: Path) -> None:
    whole = learned_on_ranks(tiny_dir, 8)
    assert whole[2]["rollout_corr/rollout_rs_masked_fraction"] > 0
    for updates in run_kept(2, learned_on_ranks, tiny_dir, 1):
        for metrics, expected in zip(updates, whole, strict=True):
            assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("preset", PRESETS_OF_DIFFERENT_KEYS)
def test_every_key_of_a_correction_preset_is_read(preset: str) -> None:
    config = load_config([*NEEDED, f"correction={preset}"])
    for name, value in CARDS.preset_leaves("correction", preset).items():
        assert value_at(config, f"{SECTION}.{name}") == value
        assert unused_reason(config, f"{SECTION}.{name}") is None


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (("correction=bypass_pg_is", "algorithm.use_kl_in_reward=true"), "use_kl_in_reward=true.*"),
        (("correction=bypass_pg_is", "algorithm=gspo"), "loss_type=reinforce.*loss_mode=gspo"),
        (
            (
                "correction=bypass_ppo_clip",
                "actor_rollout_ref.actor.policy_loss.loss_mode=reinforce",
            ),
            "loss_mode=reinforce has no ratio",
        ),
        (("correction=bypass_ppo_clip", f"{SECTION}.rollout_is=token"), "apply it twice"),
        (
            ("correction=bypass_pg_is", f"{SECTION}.rollout_is_batch_normalize=true"),
            "computed per micro-batch",
        ),
        ((f"{SECTION}.rollout_rs=token_k1",), "rollout_rs_threshold=None has 0 thresholds"),
    ],
)
def test_contradictory_settings_are_rejected(settings: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config([*NEEDED, *settings])


def trained(tiny: Path, folder: Path, *more: str) -> list[dict[str, float]]:
    settings = ("trainer.backend=local", "trainer.total_training_steps=1", *POLICY_ALONE, *more)
    run(load_config(overrides(tiny, folder, *settings)))
    return lines(folder)


def test_a_correction_of_equal_policies_changes_nothing(tiny_dir: Path, tmp_path: Path) -> None:
    (plain,) = trained(tiny_dir, tmp_path / "plain", *FEW_ROWS)
    for preset in ("bypass_ppo_clip", "decoupled_seq_is_rs"):
        (corrected,) = trained(tiny_dir, tmp_path / preset, *FEW_ROWS, f"correction={preset}")
        for name in ("actor/grad_norm", "rollout_corr/rollout_ppl"):
            assert corrected[name] == pytest.approx(plain[name], rel=1e-3)

    assert calls(tmp_path / "bypass_ppo_clip", "compute_log_prob") == []
    assert corrected["rollout_corr/rollout_is_mean"] == pytest.approx(1.0, abs=1e-4)
    assert corrected["rollout_corr/rollout_rs_masked_fraction"] == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
def test_corrections_raise_the_reward(preset: str, tiny_dir: Path, tmp_path: Path) -> None:
    settings = ["data.train_batch_size=16", "actor_rollout_ref.rollout.n=8"]
    settings += ["actor_rollout_ref.actor.optim.lr=3e-3", "trainer.total_training_steps=20"]
    scores = [
        line["critic/score/mean"]
        for line in trained(tiny_dir, tmp_path, f"correction={preset}", *settings)
    ]
    assert len(scores) == 20
    assert sum(scores[-5:]) / 5 > sum(scores[:5]) / 5 + 0.02, scores
