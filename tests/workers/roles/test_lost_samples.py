"""A rollout group loses ranks during generation: finished samples stay, others are repeated."""

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
from workers.rollout.build import build_engine
from workers.rollout.client import RolloutClient, Submission

MADE: Counter[str] = Counter()
"""By name, how often a sample was asked for of ranks that lived."""


class Sampler(RolloutWorker):
    """Several ranks in this process, each with its own engine."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        self.engine = build_engine(self._whole_config, self)
        self.engine.commit(0)

    def requests_of(self, data: DataProto) -> Any:
        requests = super().requests_of(data)
        MADE.update(request.name for request in requests)
        return requests


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    MADE.clear()
    monkeypatch.setattr(future, "AFTER_DEATH_S", 0.0)


def engines(config: WorkersConfig, count: int, dead: tuple[int, ...] = ()) -> Any:
    group = mortal_group(count, Sampler, config)
    group.init_model()
    group.transport.dead = dict.fromkeys(dead, 0)
    return group


def equal(one: DataProto, other: DataProto) -> bool:
    reasons = [each.non_tensor_batch["finish_reason"].tolist() for each in (one, other)]
    columns = one.batch.keys() == other.batch.keys()
    same = all(torch.equal(column, other.batch[name]) for name, column in one.batch.items())
    return columns and same and reasons[0] == reasons[1]


@pytest.mark.parametrize(
    ("engine", "dead", "kept", "then"),
    [
        ("native", (1,), 6, ()),
        ("native", (0, 2), 4, ()),
        ("native", (0, 1, 2), 0, (1,)),
        ("hf", (0,), 6, (0,)),
    ],
    ids=["one", "two", "all, then one of the next group", "one, then one of the next group"],
)
def test_lost_rows_alone_are_made_again_to_the_batch_of_an_undisturbed_group(
    one_layer_dir: Path,
    engine: str,
    dead: tuple[int, ...],
    kept: int,
    then: tuple[int, ...],
    caplog: pytest.LogCaptureFixture,
) -> None:
    config, prompts = tiny_config(one_layer_dir), prompt_batch(10)
    config.actor_rollout_ref.rollout.name = engine
    whole = RolloutClient(engines(config, 1)).generate(prompts)
    MADE.clear()
    of_next, numbers_kept = [then, ()], list[int]()

    def replace(error: LostSamplesError, found: Submission) -> Any:
        assert f"samples {len(found.missing)} (uid/index) were not finished" in str(error)
        numbers_kept.append(found.num_samples - sum(numbers_kept))
        return engines(config, 2, of_next.pop(0))

    assert equal(RolloutClient(engines(config, 3, dead)).generate(prompts, replace), whole)
    assert numbers_kept[0] == kept
    assert f"role rank {dead[0]} of 3 (here): gone The other ranks finish" in caplog.text
    assert len(numbers_kept) == (2 if then else 1)
    assert set(MADE.values()) == {1}, "by ranks that live every sample is made once"
    assert len(MADE) == 10


def test_a_group_that_is_not_replaced_ends_the_generation_with_the_names_of_what_is_lost(
    one_layer_dir: Path,
) -> None:
    words = r"Of 10 samples 4 \(uid/index\) were not finished: 2-0/0, 2-0/1, 3-0/0, 3-0/1\."
    with pytest.raises(LostSamplesError, match=words):
        RolloutClient(engines(tiny_config(one_layer_dir), 3, (1,))).generate(prompt_batch(10))
