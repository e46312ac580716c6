"""The rollout role: weights that come within a generation; responses over several calls."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.workers.prompts import META, prompt_batch
from tests.workers.samples import RESPONSE, make_batch, started, tiny_config
from trainer.rollouts.rollouts import with_responses
from verl_like import RayResourcePool, RayWorkerGroup
from verl_like.backends.local import LocalWorkerGroup
from verl_like.batch.protocol import DataProto
from verl_like.calls.dispatch import Dispatch, register
from verl_like.calls.group import ClassWithInitArgs
from verl_like.errors import MissingColumnError, RolloutError, WeightSyncError
from verl_like.placement.pools import ResourcePool
from workers.roles.actor import ActorWorker
from workers.roles.rollout import RolloutWorker
from workers.rollout.batches import REQUEST
from workers.rollout.client import RolloutClient, Submission
from workers.weights.sync import deliver_weights, publish_weights

WITHOUT_EOS = META | {"eos_token_id": 63}


class Refusing(RolloutWorker):
    """One of its ranks takes no weights, once that is said."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def refuse_on_rank(self, rank: int) -> None:
        def refuse(tensors: Any, seen: Any = None) -> None:
            raise WeightSyncError("this rank takes none")

        if self.rank == rank:
            self.engine.load_weights = refuse


@pytest.fixture(params=["local", pytest.param("ray", marks=pytest.mark.ray)])
def group(one_layer_dir: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    """Two ranks, which have no weights yet."""
    config = tiny_config(one_layer_dir)
    recipe = ClassWithInitArgs(Refusing, config)
    if request.param != "ray":
        made: Any = LocalWorkerGroup(ResourcePool([2]), recipe)
        made.init_model()
        yield made
        made.shutdown()
        return
    request.getfixturevalue("ray_session")
    pool = RayResourcePool([2], cpus_per_process=0.5)
    made = RayWorkerGroup(pool, recipe)
    made.init_model()
    yield made
    made.shutdown()
    pool.release()


def test_weights_come_between_two_takes_or_all_ranks_end_with_an_error(
    one_layer_dir: Path, group: Any
) -> None:
    config = tiny_config(one_layer_dir, ppo_mini_batch_size=8)
    actor = LocalWorkerGroup(ResourcePool([1]), ClassWithInitArgs(ActorWorker, config))
    actor.init_model(10)
    publish_weights(actor, 0)
    deliver_weights(actor, group, 0)

    client = RolloutClient(group)
    client.submit(Submission(prompt_batch(1, meta=WITHOUT_EOS)))  # nothing for the second rank
    assert client.take(max_tokens=2) == []
    actor.update_actor(make_batch(8)).get()
    publish_weights(actor, 1)
    deliver_weights(actor, group, 1)
    (submission,) = client.take()
    samples = submission.samples()
    assert samples.batch["token_versions"].tolist() == [[0, 0, 1, 1, 1]]
    assert samples.batch["policy_version"].tolist() == [0]
    assert group.weights_checksum() == actor.weights_checksum() * 2
    samples = submission.rows.select(["sample_index"]).union(samples)
    now = actor.compute_log_prob(samples)[0].batch["old_log_probs"]
    gap = (now - samples.batch["rollout_log_probs"]).abs()[0]
    assert gap[2:].max() < 1e-5 < gap[:2].max()

    group.refuse_on_rank(1)
    client.submit(Submission(prompt_batch(1, meta=WITHOUT_EOS)))
    client.take(max_tokens=2)
    with pytest.raises(WeightSyncError, match="rollout rank 1: this rank takes none"):
        deliver_weights(actor, group, 1)
    with pytest.raises(RolloutError, match="new weights came within a generation .* were refused"):
        client.take()
    actor.shutdown()


@pytest.fixture(scope="module")
def worker(one_layer_dir: Path) -> RolloutWorker:
    worker: RolloutWorker = started(RolloutWorker, tiny_config(one_layer_dir))
    worker.engine.commit(3)
    return worker


SEVERAL_EOS = WITHOUT_EOS | {"eos_token_id": [7, 9, 13, 21]}


def drawn(worker: RolloutWorker, prompts: DataProto) -> DataProto:
    """The prompts with their samples, as the driver joins them."""
    samples = worker.generate_sequences(prompts)
    return with_responses(prompts, samples)


def begun(worker: RolloutWorker, rows: DataProto, max_tokens: int) -> DataProto:
    """The rows with what is drawn after so many tokens; the others are aborted."""
    numbers = DataProto.from_dict({REQUEST: torch.arange(len(rows))})
    worker.submit(rows.select().union(numbers))
    parts = [worker.take(max_tokens), worker.abort()]
    samples = DataProto.concat([part for part in parts if part is not None])
    samples = samples.select_idxs(torch.argsort(samples.pop([REQUEST]).padded(REQUEST)))
    return with_responses(rows, samples)


def unfinished(rows: DataProto) -> DataProto:
    return rows.select_idxs(torch.from_numpy(rows.non_tensor_batch["finish_reason"] == "abort"))


def by_sample(parts: list[DataProto]) -> dict[tuple[str, int], DataProto]:
    """(uid, index) -> the one row that is finished."""
    rows = [part[row : row + 1] for part in parts for row in range(len(part))]
    finished = [row for row in rows if row.non_tensor_batch["finish_reason"][0] != "abort"]
    named = {
        (row.non_tensor_batch["uid"][0], int(row.batch["sample_index"][0])): row for row in finished
    }
    assert len(named) == len(finished)
    return named


@pytest.mark.parametrize("sampling", [{}, {"truncated_log_probs": True, "top_k": 20}])
def test_responses_over_several_calls_are_those_of_one_bit_for_bit(
    worker: RolloutWorker, sampling: dict[str, Any]
) -> None:
    meta = SEVERAL_EOS | sampling
    whole = by_sample([drawn(worker, prompt_batch(10, meta=meta))])
    prompts, parts = prompt_batch(10, meta=meta), []
    while len(prompts):
        parts.append(begun(worker, prompts, 2))
        prompts = unfinished(parts[-1])
    assert len(parts) == -(-RESPONSE // 2)
    in_parts = by_sample(parts)
    assert whole.keys() == in_parts.keys()
    for name, sample in whole.items():
        for column, values in sample.batch.items():
            assert torch.equal(in_parts[name].batch[column], values), (name, column)
        reasons = sample.non_tensor_batch["finish_reason"]
        assert (in_parts[name].non_tensor_batch["finish_reason"] == reasons).all()


def test_rows_that_lack_a_column_of_what_they_have_so_far_are_refused(
    worker: RolloutWorker,
) -> None:
    rest = unfinished(begun(worker, prompt_batch(4, meta=SEVERAL_EOS), 2))
    assert len(rest) >= 2
    rest.pop(["token_versions"])
    with pytest.raises(MissingColumnError, match="no 'token_versions'"):
        worker.generate_sequences(rest)


def test_finished_rows_are_not_generated_again(worker: RolloutWorker) -> None:
    with pytest.raises(RolloutError, match="there is nothing to go on with"):
        worker.generate_sequences(drawn(worker, prompt_batch(4)))
