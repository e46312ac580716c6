"""A step's samples are written while the driver would only wait for the update."""

from __future__ import annotations

from pathlib import Path

from tests.integration.runs import POLICY_ALONE, lines, overrides
from trainer import PPOTrainer, load_config, run
from verl_like.batch.protocol import DataProto

SHORT = (*POLICY_ALONE, "trainer.total_training_steps=2", "trainer.backend=local")


class CheckingTrainer(PPOTrainer):
    """Checks that a step's samples are written before its update has ended."""

    def on_update(self, batch: DataProto) -> None:
        assert (self.run.folder / "rollouts" / f"{self.global_step}.jsonl").is_file()


def test_samples_are_written_before_an_update_ends(tiny_dir: Path, tmp_path: Path) -> None:
    run(load_config(overrides(tiny_dir, tmp_path, *SHORT)), CheckingTrainer)


class OwnUpdate(PPOTrainer):
    """Learns nothing."""

    def update(self, batch: DataProto) -> dict[str, float]:
        return {}


def test_samples_of_a_user_s_update_are_written_and_counted(tiny_dir: Path, tmp_path: Path) -> None:
    run(load_config(overrides(tiny_dir, tmp_path, *SHORT)), OwnUpdate)
    assert len(list((tmp_path / "rollouts").glob("*.jsonl"))) == 2
    for line in lines(tmp_path):
        drawn = line["training/num_sampled_tokens"]
        assert line["training/num_excluded_tokens/by code of the run's own"] == drawn > 0
