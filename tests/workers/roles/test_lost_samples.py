"""A rollout group loses ranks during generation: only unfinished samples are repeated."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.verl_like.mortal_transport import mortal_group
from tests.workers.prompts import prompt_batch
from tests.workers.samples import tiny_config
from verl_like.batch.protocol import DataProto
from verl_like.calls import future
from verl_like.calls.dispatch import Dispatch, register
from verl_like.errors import LostSamplesError
from workers.config import WorkersConfig
from workers.roles.rollout import RolloutWorker
from workers.rollout.build_engine import build_engine
from workers.rollout.client import RolloutClient, Submission

REQUESTS: Counter[str] = Counter()
"""Requests per sample to ranks that live."""


class Sampler(RolloutWorker):
    """Several ranks in this process, each with its own engine."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self, reads_images: bool = False) -> None:
        self.engine = build_engine(self._run_config, self)
        self.engine.commit(0)

    def _begin(self, data: DataProto) -> Any:
        named = zip(data.non_tensor_batch["uid"], data.padded("sample_index").tolist(), strict=True)
        names = [f"uid {uid} sample {index}" for uid, index in named]
        REQUESTS.update(names[: data.num_real_rows])
        return super()._begin(data)


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    REQUESTS.clear()
    monkeypatch.setattr(future, "AFTER_DEATH_S", 0.0)


def engines(config: WorkersConfig, count: int, dead: tuple[int, ...] = ()) -> Any:
    group = mortal_group(count, Sampler, config)
    group.init_model()
    group.transport.dead = dict.fromkeys(dead, 0)
    return group


def equal(samples: DataProto, other: DataProto) -> bool:
    reasons = [batch.non_tensor_batch["finish_reason"].tolist() for batch in (samples, other)]
    columns = samples.batch.keys() == other.batch.keys()
    same = all(torch.equal(column, other.batch[name]) for name, column in samples.batch.items())
    return columns and same and reasons[0] == reasons[1]


@pytest.mark.parametrize(
    ("engine", "dead", "num_finished", "dead_next"),
    [
        ("native", (1,), 6, ()),
        ("native", (0, 2), 4, ()),
        ("native", (0, 1, 2), 0, (1,)),
        ("hf", (0,), 6, (0,)),
    ],
    ids=["one", "two", "all, then one of the next group", "one, then one of the next group"],
)
def test_only_lost_samples_are_repeated_and_the_batch_is_the_same(
    one_layer_dir: Path,
    engine: str,
    dead: tuple[int, ...],
    num_finished: int,
    dead_next: tuple[int, ...],
    caplog: pytest.LogCaptureFixture,
) -> None:
    config, prompts = tiny_config(one_layer_dir), prompt_batch(10)
    config.actor_rollout_ref.rollout.name = engine
    expected = RolloutClient(engines(config, 1)).generate(prompts)
    REQUESTS.clear()
    dead_ranks, finished = [dead_next, ()], list[int]()

    def replace(error: LostSamplesError, submission: Submission) -> Any:
        assert f"samples {len(submission.missing)} (uid/index) were not finished" in str(error)
        finished.append(submission.num_samples - sum(finished))
        return engines(config, 2, dead_ranks.pop(0))

    assert equal(RolloutClient(engines(config, 3, dead)).generate(prompts, replace), expected)
    assert finished[0] == num_finished
    assert f"role rank {dead[0]} of 3 (here): gone The other ranks finish" in caplog.text
    assert len(finished) == (2 if dead_next else 1)
    assert set(REQUESTS.values()) == {1}, "a live rank repeated a sample"
    assert len(REQUESTS) == 10


def test_without_a_new_group_the_error_names_the_lost_samples(
    one_layer_dir: Path,
) -> None:
    words = r"Of 10 samples 4 \(uid/index\) were not finished: 2-0/0, 2-0/1, 3-0/0, 3-0/1\."
    with pytest.raises(LostSamplesError, match=words):
        RolloutClient(engines(tiny_config(one_layer_dir), 3, (1,))).generate(prompt_batch(10))
