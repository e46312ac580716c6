"""The list of filters: a user's own entry, and the order of the list."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.runs import POLICY_ALONE, lines, overrides
from trainer import PPOTrainer, load_config, run
from trainer.observers.sample_log import tokens_by_sample
from trainer.ppo.config import PPOConfig
from trainer.ppo.filters import FILTERS, Filtered, register_filter
from trainer.stubs import trace_step
from verl_like.batch.protocol import DataProto
from verl_like.errors import ConfigError
from workers.columns import write_columns

SHORT = "long responses"
LONGEST = 5


class Recorder(PPOTrainer):
    seen: list[tuple[str, int, int]] = []

    def on_filter(self, name: str, before: DataProto, after: DataProto) -> None:
        counts = (sum(tokens_by_sample(batch).values()) for batch in (before, after))
        self.seen.append((name, *counts))


@pytest.fixture
def short_responses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register a filter that masks responses of more than LONGEST tokens."""
    monkeypatch.setattr(FILTERS, "_entries", dict(FILTERS))

    @register_filter(SHORT)
    def keep(batch: DataProto, config: PPOConfig, step: int) -> Filtered:
        mask = batch.batch["response_mask"]
        is_long = mask.sum(dim=-1, keepdim=True) > LONGEST
        masked = mask.masked_fill(is_long, 0)
        metrics = {"filter/long": float(is_long.sum())}
        return write_columns(batch.select(), response_mask=masked), metrics


@pytest.mark.usefixtures("short_responses")
def test_a_registered_filter_runs_last_and_its_tokens_are_accounted_for(
    tiny_dir: Path, tmp_path: Path
) -> None:
    settings = ("trainer.backend=local", "trainer.total_training_steps=1", *POLICY_ALONE)
    Recorder.seen.clear()
    config = load_config(overrides(tiny_dir, tmp_path, *settings))
    run(config, Recorder)

    assert [name for name, _, _ in Recorder.seen] == ["on_failure=skip", SHORT]
    _, before, after = Recorder.seen[-1]
    assert 0 < after < before
    metrics = lines(tmp_path)[-1]
    assert metrics["filter/long"] > 0
    assert metrics[f"training/num_excluded_tokens/{SHORT}"] == before - after
    assert SHORT in [node.name for node in trace_step(config)[0]]


def test_a_filter_with_other_parameters_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"the filter 'mine' has the parameters \(batch\)"):
        register_filter("mine")(lambda batch: (batch, {}))  # type: ignore[misc]
