"""The rollout role: processes that die during generation, aborts, weights by dtype."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.verl_like.groups import start
from tests.workers.prompts import META, prompt_batch
from tests.workers.samples import beside, make_batch, started, tiny_config
from verl_like.batch.protocol import DataProto
from verl_like.calls.dispatch import Dispatch, register
from verl_like.errors import ConfigError, RolloutError
from workers.roles.actor import ActorWorker
from workers.roles.rollout import RolloutWorker
from workers.rollout.client import RolloutClient, Submission


class KillableRollout(RolloutWorker):
    """A rollout whose second rank can be killed in its next generation."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def accept_initial_weights(self) -> None:
        self.engine.commit(0)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def kill_second_rank(self) -> None:
        if self.rank == 1:
            self.engine.submit = lambda *_: os.kill(os.getpid(), signal.SIGKILL)


GREEDY = META | {"do_sample": False}


def generate_token_by_token(group: Any) -> DataProto:
    """Run two submissions, of which the second joins the first, token by token."""
    client, prompts = RolloutClient(group), prompt_batch(10, meta=GREEDY)
    submissions = [Submission(prompts[:6]), Submission(prompts[6:])]
    client.submit(submissions[0])
    client.collect(max_tokens=2)
    client.submit(submissions[1])
    while client.submissions:
        client.collect(max_tokens=1)
    return DataProto.concat([submission.samples() for submission in submissions])


def generate_after_an_abort(group: Any) -> DataProto:
    """Abort a generation, then sample its prompts again."""
    client = RolloutClient(group)
    client.submit(Submission(prompt_batch(10, meta=GREEDY)))
    client.collect(max_tokens=2)
    group.abort()
    return RolloutClient(group).generate(prompt_batch(10, meta=GREEDY))


@pytest.mark.parametrize("backend", ["local", pytest.param("ray", marks=pytest.mark.ray)])
def test_two_engines_sample_as_one_does_and_unfinished_samples_of_a_killed_one_are_named(
    one_layer_dir: Path, backend: str, request: pytest.FixtureRequest
) -> None:
    if backend == "ray":
        request.getfixturevalue("ray_session")
    config, samples = tiny_config(one_layer_dir), []
    roles = {"rollout": (KillableRollout, (config,))}
    for group_backend, num_ranks in (("local", 1), (backend, 2)):
        with start(group_backend, roles, [num_ranks]) as group:
            group.init_model()
            group.accept_initial_weights()
            samples += [
                RolloutClient(group).generate(prompt_batch(10, meta=META | {"do_sample": random}))
                for random in (True, False)
            ]
            if num_ranks == 2:
                for repeated in (generate_token_by_token(group), generate_after_an_abort(group)):
                    for name, column in repeated.batch.items():
                        assert torch.equal(column, samples[-1].batch[name]), name
                group.kill_second_rank()
                words = (
                    r"Of 10 samples 5 \(uid/index\) were not finished: "
                    "2-0/1, 3-0/0, 3-0/1, 4-0/0, 4-0/1"
                )
                with pytest.raises(RolloutError, match=words):
                    RolloutClient(group).generate(prompt_batch(10))
    for expected, by_two in zip(samples[:2], samples[2:], strict=True):
        for name, column in by_two.batch.items():
            assert torch.equal(expected.batch[name], column), name
    assert not torch.equal(samples[0].batch["responses"], samples[1].batch["responses"])


@pytest.mark.parametrize("engine", ["native", "hf"])
def test_the_rollout_of_a_float32_actor_that_computes_in_bfloat16_has_a_bfloat16_copy(
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


def test_a_rollout_with_the_dtype_of_the_weights_shares_the_actor_s_module(
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
def test_engine_kwargs_that_the_engine_sets_itself_are_rejected(
    one_layer_dir: Path, name: str, words: str
) -> None:
    config = tiny_config(one_layer_dir)
    config.actor_rollout_ref.rollout.name = "vllm"
    config.actor_rollout_ref.rollout.engine_kwargs = {"quantization": "fp8", name: "auto"}
    with pytest.raises(ConfigError, match=words):
        RolloutWorker(config)


def test_vllm_gets_the_dtype_of_the_rollout(
    one_layer_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(one_layer_dir)
    config.actor_rollout_ref.rollout.name = "vllm"
    config.actor_rollout_ref.rollout.dtype = "bfloat16"
    monkeypatch.setattr(
        "workers.rollout.vllm.engine.VllmRolloutEngine",
        lambda settings, *_, **__: SimpleNamespace(settings=settings, close=lambda: None),
    )
    engine: Any = started(RolloutWorker, config).engine
    assert engine.settings.dtype == "bfloat16"


def test_a_bfloat16_actor_sends_bfloat16_weights_and_the_gap_is_small(one_layer_dir: Path) -> None:
    config = tiny_config(one_layer_dir)
    config.actor_rollout_ref.model.dtype = "bfloat16"
    actor, rollout = started(ActorWorker, config, 1), started(RolloutWorker, config)
    tensors = list(actor.engine.named_full_tensors())
    assert {tensor.dtype for _, tensor in tensors} == {torch.bfloat16}
    rollout.engine.load_weights(tensors)
    rollout.engine.commit(1)
    assert rollout.weights_checksum() == actor.weights_checksum()
    data = rollout.generate_sequences(prompt_batch(12))
    old = actor.compute_log_prob(data)[0].batch["old_log_probs"]
    assert (old - data.batch["rollout_log_probs"]).abs().max() < 0.1
