"""The rollout role: processes that die during generation, aborts, weights by dtype."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.workers.prompts import META, prompt_batch
from tests.workers.samples import beside, make_batch, started, tiny_config
from verl_like import RayResourcePool, RayWorkerGroup
from verl_like.backends.local import LocalWorkerGroup
from verl_like.batch.protocol import DataProto
from verl_like.calls.dispatch import Dispatch, register
from verl_like.calls.group import ClassWithInitArgs
from verl_like.errors import ConfigError, RolloutError
from verl_like.placement.pools import ResourcePool
from workers.config import WorkersConfig
from workers.roles.actor import ActorWorker
from workers.roles.rollout import RolloutWorker
from workers.rollout.client import RolloutClient, Submission


class Doomed(RolloutWorker):
    """Its second rank is killed when it generates, if the test says so."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def be_current(self) -> None:
        self.engine.commit(0)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def be_doomed(self) -> None:
        if self.rank == 1:
            self.engine.submit = lambda *_: os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def engines(config: WorkersConfig, backend: str, count: int) -> Iterator[Any]:
    recipe = ClassWithInitArgs(Doomed, config)
    if backend == "local":
        group = LocalWorkerGroup(ResourcePool([count]), recipe)
        yield group
        group.shutdown()
        return
    pool = RayResourcePool([count], cpus_per_process=0.5)
    group = RayWorkerGroup(pool, recipe)
    yield group
    group.shutdown()
    pool.release()


GREEDY = META | {"do_sample": False}


def in_slices(group: Any) -> DataProto:
    """Run two submissions, of which the second joins the first, token by token."""
    client, prompts = RolloutClient(group), prompt_batch(10, meta=GREEDY)
    parts = [Submission(prompts[:6]), Submission(prompts[6:])]
    client.submit(parts[0])
    client.take(max_tokens=2)
    client.submit(parts[1])
    while client.submissions:
        client.take(max_tokens=1)
    return DataProto.concat([part.samples() for part in parts])


def after_an_abort(group: Any) -> DataProto:
    """Return the samples of prompts of which some were aborted."""
    client = RolloutClient(group)
    client.submit(Submission(prompt_batch(10, meta=GREEDY)))
    client.take(max_tokens=2)
    group.abort()
    return RolloutClient(group).generate(prompt_batch(10, meta=GREEDY))


@pytest.mark.parametrize("backend", ["local", pytest.param("ray", marks=pytest.mark.ray)])
def test_two_engines_sample_as_one_does_and_the_samples_of_a_killed_one_are_reported_by_uid(
    one_layer_dir: Path, backend: str, request: pytest.FixtureRequest
) -> None:
    if backend == "ray":
        request.getfixturevalue("ray_session")
    config, samples = tiny_config(one_layer_dir), []
    for kind, count in (("local", 1), (backend, 2)):
        with engines(config, kind, count) as group:
            group.init_model()
            group.be_current()
            samples += [
                RolloutClient(group).generate(prompt_batch(10, meta=META | {"do_sample": draws}))
                for draws in (True, False)
            ]
            if count == 2:
                for again in (in_slices(group), after_an_abort(group)):
                    for name, column in again.batch.items():
                        assert torch.equal(column, samples[-1].batch[name]), name
                group.be_doomed()
                words = (
                    r"Of 10 samples 5 \(uid/index\) were not finished: "
                    "2-0/1, 3-0/0, 3-0/1, 4-0/0, 4-0/1"
                )
                with pytest.raises(RolloutError, match=words):
                    RolloutClient(group).generate(prompt_batch(10))
    for one, two in zip(samples[:2], samples[2:], strict=True):
        assert all(torch.equal(one.batch[name], column) for name, column in two.batch.items())
    assert not torch.equal(samples[0].batch["responses"], samples[1].batch["responses"])


@pytest.mark.parametrize("engine", ["native", "hf"])
def test_beside_a_float32_actor_that_computes_in_bfloat16_the_rollout_keeps_a_bfloat16_copy(
    one_layer_dir: Path, engine: str
) -> None:
    config = tiny_config(one_layer_dir, ppo_mini_batch_size=8)
    config.actor_rollout_ref.model.compute_dtype = "bfloat16"
    config.actor_rollout_ref.rollout.name = engine
    actor = started(ActorWorker, config, 2)
    rollout = beside(actor, RolloutWorker, config)
    for version in range(2):
        assert rollout.update_weights(version).error is None
        assert rollout.weights_checksum() == actor.weights_checksum(as_sent=True)
        assert rollout.weights_checksum() != actor.weights_checksum()
        assert {weight.dtype for _, weight in rollout.engine.named_weights()} == {torch.bfloat16}
        assert {weight.dtype for weight in actor.engine.parameters()} == {torch.float32}

        data = rollout.generate_sequences(prompt_batch(12))
        old = actor.compute_log_prob(data)[0].batch["old_log_probs"]
        assert (old - data.batch["rollout_log_probs"]).abs().max() < 0.05
        actor.update_actor(make_batch(8))
    rollout.engine.module.lm_head.weight.data[0, 0] += 1
    assert rollout.weights_checksum() != actor.weights_checksum(as_sent=True)


def test_a_rollout_of_the_weights_own_type_shares_the_module_however_passes_compute(
    one_layer_dir: Path,
) -> None:
    config = tiny_config(one_layer_dir)
    config.actor_rollout_ref.model.compute_dtype = "bfloat16"
    config.actor_rollout_ref.rollout.dtype = "float32"
    actor = started(ActorWorker, config, 2)
    rollout = beside(actor, RolloutWorker, config)
    assert rollout.engine.module is actor.engine.module


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("dtype", "rollout.engine_kwargs.dtype: set actor_rollout_ref.rollout.dtype instead"),
        ("load_format", "rollout.engine_kwargs.load_format: the engine sets this argument"),
    ],
)
def test_an_argument_that_the_engine_gives_to_vllm_itself_is_refused(
    one_layer_dir: Path, name: str, words: str
) -> None:
    config = tiny_config(one_layer_dir)
    config.actor_rollout_ref.rollout.name = "vllm"
    config.actor_rollout_ref.rollout.engine_kwargs = {"quantization": "fp8", name: "auto"}
    with pytest.raises(ConfigError, match=words):
        RolloutWorker(config)


def test_vllm_gets_the_type_of_the_rollout(
    one_layer_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(one_layer_dir)
    config.actor_rollout_ref.rollout.name = "vllm"
    config.actor_rollout_ref.rollout.dtype = "bfloat16"
    monkeypatch.setattr(
        "workers.rollout.vllm.engine.VllmEngine", lambda settings, *_, **__: settings
    )
    assert started(RolloutWorker, config).engine.dtype == "bfloat16"


def test_a_bfloat16_actor_sends_bfloat16_and_the_gap_is_its_rounding(one_layer_dir: Path) -> None:
    config = tiny_config(one_layer_dir)
    config.actor_rollout_ref.model.dtype = "bfloat16"
    actor, rollout = started(ActorWorker, config, 1), started(RolloutWorker, config)
    tensors = list(actor.engine.named_full_tensors())
    assert {tensor.dtype for _, tensor in tensors} == {torch.bfloat16}
    rollout.engine.load_weights(tensors)
    rollout.engine.commit(1)
    assert rollout.weights_checksum() == actor.weights_checksum()
    data = rollout.generate_sequences(prompt_batch(12))
    gap = (
        (actor.compute_log_prob(data)[0].batch["old_log_probs"] - data.batch["rollout_log_probs"])
        .abs()
        .max()
    )
    assert gap < 0.1
