"""A rollout process that dies within a generation, and weights that change within one."""

import os
import signal
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from prompts import META, prompt_batch
from rollout_engines import (
    full_logits,
    load,
    make_engine,
    make_model,
    make_prompts,
    requests_of,
    settings,
)
from samples import started, tiny_config

from verl_like import RayResourcePool, RayWorkerGroup
from verl_like.backends.local.group import LocalWorkerGroup
from verl_like.calls.dispatch import Dispatch, register
from verl_like.calls.group import ClassWithInitArgs
from verl_like.errors import RolloutError
from verl_like.placement.pools import ResourcePool
from workers.roles.actor import ActorWorker
from workers.roles.rollout import RolloutWorker, generate


class Doomed(RolloutWorker):
    """Its second rank is killed when it generates, once that is said."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def be_current(self):
        self.engine.commit(0)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, past_queue=True)
    def is_standing(self):
        return self.engine.control.standing

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def be_doomed(self):
        if self.rank == 1:
            self.engine.generate = lambda *_: os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def engines(config, backend, count):
    recipe = ClassWithInitArgs(Doomed, config)
    if backend == "local":
        group = LocalWorkerGroup(ResourcePool([count]), recipe)
        yield group
        group.shutdown()
        return
    pool = RayResourcePool([count], cpus_per_process=0.5)
    group = RayWorkerGroup(pool, recipe, worker_env={"PYTHONPATH": str(Path(__file__).parents[1])})
    yield group
    group.shutdown()
    pool.release()


def standing_still(group):
    """A generation that `pause` holds, from the driver, while the workers are busy with it."""
    group.pause()
    future = group.generate_sequences.remote(prompt_batch(10, meta=META | {"do_sample": False}))
    while not all(group.is_standing()):
        time.sleep(0.02)
    assert not future.done()
    return future


def held_for_a_while(group):
    future = standing_still(group)
    group.resume()
    return future.get()


def aborted(group):
    future = standing_still(group)
    group.abort()
    return future.get()


@pytest.mark.parametrize("backend", ["local", pytest.param("ray", marks=pytest.mark.ray)])
def test_two_engines_sample_as_one_does_and_the_samples_of_a_killed_one_are_reported_by_uid(
    tiny_dir, backend, request
):
    if backend == "ray":
        request.getfixturevalue("ray_session")
    config, samples = tiny_config(tiny_dir), []
    for kind, count in (("local", 1), (backend, 2)):
        with engines(config, kind, count) as group:
            group.init_model()
            group.be_current()
            samples += [
                generate(group, prompt_batch(10, meta=META | {"do_sample": draws}))
                for draws in (True, False)
            ]
            if count == 2:
                assert torch.equal(
                    held_for_a_while(group).batch["responses"], samples[-1].batch["responses"]
                )
                assert set(aborted(group).non_tensor_batch["finish_reason"]) == {"abort"}
                group.be_doomed()
                words = r"Of 10 samples 5 \(uid/index\) were not finished: 2-0/1, 3-0/0, 3-0/1, 4-0/0, 4-0/1"
                with pytest.raises(RolloutError, match=words):
                    generate(group, prompt_batch(10))
    for one, two in zip(samples[:2], samples[2:], strict=True):
        assert all(torch.equal(one.batch[name], column) for name, column in two.batch.items())
    assert not torch.equal(samples[0].batch["responses"], samples[1].batch["responses"])


def test_tokens_after_a_sync_within_a_paused_generation_are_the_new_versions(tmp_path):
    old, new = make_model(tmp_path / "old", 0), make_model(tmp_path / "new", 1)
    engine = make_engine("native", old, tmp_path, max_num_seqs=6)
    load(engine, old, 1)
    plain = settings(do_sample=False, stop_token_ids=(63,))
    reached, go_on, checkpoint, steps = (
        threading.Event(),
        threading.Event(),
        engine.control.checkpoint,
        [],
    )

    def watched():
        steps.append(0)
        if len(steps) == 6:
            reached.set()
            assert go_on.wait(30)
        return checkpoint()

    engine.control.checkpoint = watched
    results = []
    thread = threading.Thread(
        target=lambda: results.extend(engine.generate(requests_of(make_prompts()), plain))
    )
    thread.start()
    assert reached.wait(30)
    threading.Timer(0.2, go_on.set).start()
    engine.control.pause()
    load(engine, new, 2)
    engine.control.resume()
    thread.join(60)
    mixed = 0
    for request, output in zip(requests_of(make_prompts()), results, strict=True):
        versions = output.versions.tolist()
        assert versions == sorted(versions)
        mixed += len(set(versions)) == 2
        for model, version in ((old, 1), (new, 2)):
            made = output.versions == version
            logits = full_logits(model, list(request.prompt), output.tokens)
            assert torch.equal(logits.argmax(-1)[made], output.tokens[made])
            expected = torch.log_softmax(logits, -1).gather(1, output.tokens[:, None])[:, 0]
            torch.testing.assert_close(output.log_probs[made], expected[made], atol=1e-4, rtol=0)
    assert mixed == 6


def test_a_cache_too_small_for_its_least_rows_says_how_much_it_needs(tiny_dir):
    config = tiny_config(tiny_dir)
    config.actor_rollout_ref.rollout.kv_cache_gb = 1e-6
    with pytest.raises(
        RolloutError,
        match=r"kv_cache_gb=1e-06 is too small.*takes .* GiB.*kv_cache_gb to .* or more",
    ):
        started(RolloutWorker, config)
    config.actor_rollout_ref.rollout.kv_cache_gb = 3e-4
    assert 4 <= started(RolloutWorker, config).engine.max_active < 20


def test_a_bfloat16_actor_sends_bfloat16_and_the_gap_is_its_rounding(tiny_dir):
    config = tiny_config(tiny_dir)
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
