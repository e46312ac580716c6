"""The rollout role: weights that arrive during generation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.verl_like.groups import start
from tests.workers.prompts import META, prompt_batch
from tests.workers.samples import make_batch, tiny_config
from verl_like.calls.dispatch import Dispatch, register
from verl_like.errors import RolloutError, WeightSyncError
from workers.roles.actor import ActorWorker
from workers.roles.rollout import RolloutWorker
from workers.rollout.client import RolloutClient, Submission
from workers.weights.sync import deliver_weights, publish_weights

WITHOUT_EOS = META | {"eos_token_id": 63}


class RejectingRollout(RolloutWorker):
    """A rollout of which one rank can be told to reject weights."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def reject_weights_on(self, rank: int) -> None:
        def reject(tensors: Any, seen: Any = None) -> None:
            raise WeightSyncError("this rank takes none")

        if self.rank == rank:
            self.engine.load_weights = reject


@pytest.fixture(params=["local", pytest.param("ray", marks=pytest.mark.ray)])
def group(one_layer_dir: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    """Two ranks without weights."""
    if request.param == "ray":
        request.getfixturevalue("ray_session")
    roles = {"rollout": (RejectingRollout, (tiny_config(one_layer_dir),))}
    with start(request.param, roles, [2]) as started:
        started.init_model()
        yield started


@pytest.fixture
def actor(one_layer_dir: Path) -> Iterator[Any]:
    config = tiny_config(one_layer_dir, ppo_mini_batch_size=8)
    with start("local", {"actor": (ActorWorker, (config,))}, [1]) as started:
        started.init_model(10)
        yield started


def test_weights_arrive_between_two_takes_or_all_ranks_raise_an_error(
    actor: Any, group: Any
) -> None:
    publish_weights(actor, 0)
    deliver_weights(actor, group, 0)

    client = RolloutClient(group)
    client.submit(Submission(prompt_batch(1, meta=WITHOUT_EOS)))  # nothing for the second rank
    assert client.collect(max_tokens=2) == []
    actor.update_actor(make_batch(8)).get()
    publish_weights(actor, 1)
    deliver_weights(actor, group, 1)
    (submission,) = client.collect()
    samples = submission.samples()
    assert samples.batch["token_versions"].tolist() == [[0, 0, 1, 1, 1]]
    assert samples.batch["policy_version"].tolist() == [0]
    assert group.weights_checksum() == actor.weights_checksum() * 2
    samples = submission.rows.select(["sample_index"]).union(samples)
    now = actor.compute_log_prob(samples)[0].batch["old_log_probs"]
    gap = (now - samples.batch["rollout_log_probs"]).abs()[0]
    assert gap[2:].max() < 1e-5 < gap[:2].max()

    group.reject_weights_on(1)
    client.submit(Submission(prompt_batch(1, meta=WITHOUT_EOS)))
    client.collect(max_tokens=2)
    with pytest.raises(WeightSyncError, match="rollout rank 1: this rank takes none"):
        deliver_weights(actor, group, 1)
    with pytest.raises(RolloutError, match="a weight sync failed during a generation of 1 samples"):
        client.collect()
