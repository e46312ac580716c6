"""Samples with tokens of several weight versions: each token has its version, none is too old."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.runs import POLICY_ALONE, lines, overrides
from tests.trainer.async_training.test_run import LOCAL, ledger_of
from tests.waiting import wait_until
from trainer import load_config, run
from trainer.async_training.generators import Generator
from trainer.async_training.recipe import ASYNC
from workers.columns import read_columns

STEPS = 3
SETTINGS = (
    LOCAL,
    "async_training.max_staleness=2",
    f"trainer.total_training_steps={STEPS}",
    "async_training.log_syncs=true",
    *POLICY_ALONE,
)


class TokensOfSteps:
    """A callback that stores columns of each step's tokens."""

    def __init__(self) -> None:
        self.steps: list[dict[str, torch.Tensor]] = []

    def on_sample_end(self, trainer: Any, batch: Any) -> None:
        names = ("token_versions", "policy_version", "response_mask", "rollout_log_probs")
        self.steps.append(read_columns(batch, *names))

    def versions(self, step: int) -> list[set[int]]:
        """Return the version of each response's tokens."""
        columns = self.steps[step - 1]
        sampled = columns["response_mask"] != 0
        pairs = zip(columns["token_versions"], sampled, strict=True)
        return [set(versions[mask].tolist()) for versions, mask in pairs]

    def log_probs_of(self, step: int, version: int) -> torch.Tensor:
        """Return the log-probs of the tokens that this version sampled."""
        columns = self.steps[step - 1]
        drawn = (columns["response_mask"] != 0) & (columns["token_versions"] == version)
        return columns["rollout_log_probs"][drawn]

    def check(self, folder: Path) -> None:
        """Check that a sample is as old as its oldest token, and that none is too old."""
        for step, columns in enumerate(self.steps, start=1):
            oldest = [min(versions) for versions in self.versions(step)]
            assert columns["policy_version"].tolist() == oldest
            assert step - min(oldest) == lines(folder)[step - 1]["async/staleness/max"] <= 2
        assert ledger_of(folder)["trainers"] == {"0": STEPS * 16}
        versions = [sync["version"] for sync in lines(folder, "syncs.jsonl")]
        assert versions == sorted(set(versions))


def tokens_of(tiny: Path, folder: Path, *more: str) -> TokensOfSteps:
    tokens = TokensOfSteps()
    run(load_config(overrides(tiny, folder, *SETTINGS, *more), ASYNC), callbacks=[tokens])
    tokens.check(folder)
    return tokens


def test_immediate_weights_keep_or_recompute_the_old_cache(tiny_dir: Path, tmp_path: Path) -> None:
    rigged = "role_workers.rollout=tests.trainer.async_training.rigged_workers.WaitsForWeights"
    at_once = (rigged, "async_training.weight_update=immediate")
    runs = {}
    for keeps in ("true", "false"):
        keep_kv_cache = f"actor_rollout_ref.rollout.keep_kv_cache={keeps}"
        runs[keeps] = tokens_of(tiny_dir, tmp_path / keeps, *at_once, keep_kv_cache)
        seen = [set.union(*runs[keeps].versions(step)) for step in range(1, STEPS + 1)]
        assert seen == [{1}, {1, 2}, {2, 3}]
        assert {1, 2} in runs[keeps].versions(2), "in one response"

    # the runs are equal until the new weights; after them their caches differ
    cached, recomputed = runs["true"], runs["false"]
    assert torch.equal(cached.log_probs_of(2, 1), recomputed.log_probs_of(2, 1))
    first, other = cached.log_probs_of(2, 2), recomputed.log_probs_of(2, 2)
    assert first.shape != other.shape or not torch.allclose(first, other, atol=1e-5)


def test_a_response_over_several_calls_continues_with_newer_weights(
    tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = Generator._collect

    def wait_for_newer(generator: Generator) -> None:
        take(generator)
        buffer = generator._buffer
        unfinished = [chunk.batch for chunk in buffer.in_flight()]
        if buffer.version == 1 and unfinished and min(unfinished) > 0:
            # the first batch is finished, and responses of the second are not
            wait_until(lambda: buffer.version > 1)

    monkeypatch.setattr(Generator, "_collect", wait_for_newer)
    per_call = "actor_rollout_ref.rollout.max_tokens_per_call=2"
    tokens = tokens_of(tiny_dir, tmp_path, per_call, "async_training.prompts_per_call=2")
    assert tokens.versions(1) == [{1}] * 16
    assert {1, 2} in tokens.versions(2)
