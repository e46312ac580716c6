"""Samples of the next step come to the driver while the roles of this one learn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.integration.runs import POLICY_ALONE, overrides
from tests.trainer.detached.test_run import LOCAL
from tests.waiting import wait_until
from trainer import load_config, run
from trainer.detached.recipe import DETACHED
from trainer.detached.step import DetachedTrainer
from verl_like.batch.protocol import DataProto


class Watching(DetachedTrainer):
    """Looks at what is queued, before and after the moment in which samples are noted."""

    def note_samples(self, batch: DataProto) -> dict[str, float]:
        buffer = self.source.buffer
        is_last = self.global_step == self.total_steps
        if not is_last:
            wait_until(lambda: buffer.depth >= len(batch))
        for one in buffer.ready:  # the driver holds references to samples, and prompts
            assert one.future is not None
            assert "responses" not in one.rows.batch.keys()
        noted = super().note_samples(batch)
        self.here = [one.future is None for one in buffer.ready]
        assert any(self.here) is not is_last
        return noted

    def make_samples(self, draw: Any) -> Any:
        """What a step takes is here already, from the second one on."""
        if self.global_step > 1:
            assert sum(one.num_samples for one in self.source.buffer.ready if one.future is None)
        return super().make_samples(draw)


def test_the_next_samples_are_here_before_their_step_begins(tiny_dir: Path, tmp_path: Path) -> None:
    more = (*POLICY_ALONE, "detached.max_staleness=2", "trainer.total_training_steps=3")
    run(load_config(overrides(tiny_dir, tmp_path, LOCAL, *more), DETACHED), Watching)
