"""The protocol over HTTP: order, repeats, losses, samplers, checkpoints, bad requests."""

from __future__ import annotations

import json
import math
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import uvicorn

from tests.trainer.serve.clients import (
    ADAM,
    TEXT,
    Client,
    FailedError,
    Model,
    answer_of,
    config_of,
    datum,
    outputs,
    policy_datum,
    prompt_log_probs,
    sequences,
    served,
    top_tokens,
)
from trainer.cli.serve import check_key
from trainer.run_folder.saved_model import find_saved_model
from trainer.serve import pending, training_ops
from trainer.serve.app import open_api
from trainer.serve.pending import PendingResult, RequestError, RequestOrder
from trainer.serve.work_queue import WorkQueue
from verl_like.errors import ConfigError

Server = tuple[WorkQueue, str]


def test_losses_are_sums_and_gradients_add_up(model: Model, server: Server) -> None:
    client = model.client
    rows, metrics = outputs(client.result(model.backward([datum(), datum(TEXT[:4])])))
    assert [len(row) for row in rows] == [6, 3]
    assert metrics["loss:sum"] == pytest.approx(-sum(map(sum, rows)), rel=1e-5)
    expected = client.result(model.step(**ADAM))["metrics"]["grad_norm"]

    other = client.model(server[0].base_model, 1)
    for row in (datum(), datum(TEXT[:4])):
        client.result(other.backward([row]))
    grad_norm = client.result(other.step(**ADAM))["metrics"]["grad_norm"]
    assert grad_norm == pytest.approx(expected, rel=1e-4)


def test_weights_may_be_fractional_negative_and_two_dimensional(model: Model) -> None:
    client, weights = model.client, [0.5, -1.0, 0.0, 2.0, 0.25, -0.125]
    (row,), metrics = outputs(client.result(model.backward([datum(weights=weights)])))
    assert metrics["loss:sum"] == pytest.approx(-np.dot(row, weights), rel=1e-5)
    targets = np.stack([TEXT[1:], TEXT[:-1]], axis=1)
    both = np.stack([weights, weights[::-1]], axis=1)
    inputs = {"target_tokens": targets, "weights": both}
    (pairs,), metrics = outputs(client.result(model.backward([(TEXT[:-1], inputs)])))
    assert np.asarray(pairs)[:, 0] == pytest.approx(row, rel=1e-4)
    assert metrics["loss:sum"] == pytest.approx(-(np.asarray(pairs) * both).sum(), rel=1e-4)


def test_forward_is_the_loss_without_gradients(model: Model) -> None:
    client = model.client
    forward = outputs(client.result(model.backward([policy_datum()], "ppo", forward_only=True)))
    with pytest.raises(FailedError, match="user: .*there are no gradients"):
        client.result(model.step(**ADAM))
    backward = outputs(client.result(model.backward([policy_datum()], "ppo")))
    assert forward[0][0] == pytest.approx(backward[0][0], rel=1e-4)
    assert forward[1]["loss:sum"] == pytest.approx(backward[1]["loss:sum"], rel=1e-4)


@pytest.mark.parametrize(
    ("loss", "settings"),
    [
        ("importance_sampling", {}),
        ("ppo", {"clip_low_threshold": 0.5, "clip_high_threshold": 2.0}),
        ("cispo", {}),
        ("dro", {"beta": 0.1}),
        ("verl_like:dppo_tv", {}),
        ("verl_like:vanilla", {"clip_ratio_high": 0.4, "loss_agg_mode": "token-sum"}),
    ],
)
def test_a_policy_loss_is_chosen_by_name(model: Model, loss: str, settings: dict[str, Any]) -> None:
    _, metrics = outputs(model.client.result(model.backward([policy_datum()], loss, **settings)))
    assert math.isfinite(metrics["loss:sum"])
    assert all(name.count(":") == 1 for name in metrics)


def test_an_algorithm_name_sets_its_loss_and_settings(model: Model) -> None:
    rows = [policy_datum(1.0), policy_datum(-1.0)]
    settings = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "loss_agg_mode": "token-mean"}

    def metrics(loss: str, **settings: Any) -> dict[str, float]:
        return outputs(model.client.result(model.backward(rows, loss, **settings)))[1]

    assert metrics("verl_like:dapo") == metrics("verl_like:vanilla", **settings)
    changed = {**settings, "clip_ratio_low": 0.9}
    usual, wide = metrics("verl_like:dapo"), metrics("verl_like:dapo", clip_ratio_low=0.9)
    assert wide == metrics("verl_like:vanilla", **changed) != usual
    gspo = {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4, "loss_agg_mode": "seq-mean-token-mean"}
    assert metrics("verl_like:gspo") == metrics("verl_like:gspo", **gspo)  # also a policy loss
    assert metrics("verl_like:gspo") != metrics("verl_like:gspo", clip_ratio_low=0.9)
    assert math.isfinite(metrics("verl_like:coati_legacy")["loss:sum"])
    with pytest.raises(FailedError, match="user: the actor has no loss 'verl_like:grpo'"):
        metrics("verl_like:grpo")  # has a KL term, which needs a reference


def test_requests_run_in_the_order_of_their_numbers(client: Client, server: Server) -> None:
    base = server[0].base_model
    in_order, shuffled = (client.model(base, seq, seed=3) for seq in (0, 1))
    datums = [[datum()], [datum(TEXT[:5])], [datum(TEXT[2:])]]
    for rows in datums:
        in_order.backward(rows)
    expected = client.result(in_order.step(**ADAM))
    promises = {}
    bodies = {n: shuffled.backward_body(n, datums[n - 1], "cross_entropy") for n in (1, 2, 3)}
    shuffled.seq = 3
    for number in (2, 3):
        promises[number] = shuffled.post_backward(bodies[number])
    step = shuffled.step(**ADAM)
    promises[1] = shuffled.post_backward(bodies[1])
    assert client.result(step) == expected
    # repeats get the same promise, and its result again
    assert shuffled.post_backward(bodies[2]) == promises[2]
    assert client.result(promises[2]) == client.result(promises[2])
    other = shuffled.backward_body(2, datums[0], "cross_entropy")
    with pytest.raises(FailedError, match="400: seq_id 2 was already sent with different contents"):
        shuffled.post_backward(other)


def test_a_failed_request_cancels_only_the_next_step(model: Model) -> None:
    client = model.client
    client.result(model.backward([datum()]))
    failed, step = model.backward([datum([7, 9, 10**6])]), model.step(**ADAM)
    with pytest.raises(FailedError, match=r"user: datum 0, target_tokens: 1000000 at \[1\] is out"):
        client.result(failed)
    with pytest.raises(
        FailedError, match="user: no optimizer step was run, and the gradients are cleared"
    ):
        client.result(step)
    unlike = [policy_datum(), policy_datum(clip_low_threshold=[0.5] * 6)]
    failed, step = model.backward(unlike, "ppo"), model.step(**ADAM)
    with pytest.raises(FailedError, match="user: datum 0 has no clip_low_threshold, which other"):
        client.result(failed)
    with pytest.raises(
        FailedError, match="forward_backward failed: datum 0 has no clip_low_threshold"
    ):
        client.result(step)
    assert model.train()["skipped_steps"] == 0


def test_a_sampler_keeps_its_weights_and_applies_seeds_and_stops(
    model: Model, server: Server
) -> None:
    model.train()
    sampler = model.sampler(0)
    params = {"max_tokens": 8, "seed": 5}

    def draw(seq: int, **params: Any) -> Any:
        return model.client.draw(sampler, seq, TEXT, sampling_params=params)

    before = draw(1, **params)
    for _ in range(3):
        model.train(learning_rate=0.1)
    assert draw(2, **params) == before
    assert draw(3, **{**params, "seed": 6}) != before
    ((tokens, log_probs, reason),) = before
    assert len(tokens) == len(log_probs) <= 8
    ((cut, _, stopped),) = draw(4, **params, stop=[tokens[2]])
    assert cut == tokens[: tokens.index(tokens[2]) + 1]
    assert (stopped, reason) == (0, 1)
    ((endless, _, reason),) = draw(5, seed=5, stop=[])
    assert (len(endless), reason) == (16, 1)
    assert model.client.draw(model.sampler(1), 1, TEXT, sampling_params=params) != before


def test_sampled_and_prompt_log_probs_are_the_trainers(model: Model) -> None:
    client, sampler = model.client, model.sampler(0)
    fields = {"prompt_logprobs": True, "sampling_params": {"max_tokens": 5, "seed": 1}}
    body = client.result(client.sample(sampler, 1, TEXT, **fields))
    ((tokens, log_probs, _),) = sequences(body)
    (row,), _ = outputs(client.result(model.backward([datum(TEXT + tokens)], forward_only=True)))
    assert log_probs == pytest.approx(row[-len(tokens) :], abs=1e-4)
    prompt = prompt_log_probs(body)
    assert math.isnan(prompt[0])
    assert prompt[1:] == pytest.approx(row[: len(TEXT) - 1], abs=1e-4)
    last = prompt_log_probs(
        client.result(client.sample(sampler, 2, TEXT, **fields, prompt_logprobs_last_n=2))
    )
    assert [math.isnan(value) for value in last] == [True] * 5 + [False] * 2


def test_the_likeliest_tokens_of_a_prompt_are_those_of_all_log_probs(
    model: Model, server: Server
) -> None:
    model.train()
    client, sampler, count = model.client, model.sampler(0), 5
    body = client.result(client.sample(sampler, 1, TEXT, topk_prompt_logprobs=count))
    ids, log_probs = top_tokens(body)
    assert (ids[0].tolist(), log_probs[0].tolist()) == ([0] * count, [-99999.0] * count)
    size = server[0].limits.vocabulary
    every = np.tile(np.arange(size), (len(TEXT) - 1, 1))
    ((row,), _) = outputs(
        client.result(model.backward([(TEXT[:-1], {"target_tokens": every})], forward_only=True))
    )
    for place, all_log_probs in enumerate(np.asarray(row), 1):
        best = np.argsort(-all_log_probs, kind="stable")[:count]
        assert ids[place].tolist() == best.tolist()
        assert log_probs[place] == pytest.approx(all_log_probs[best], abs=1e-4)
    fields = {"topk_prompt_logprobs": 3, "prompt_logprobs": True, "prompt_logprobs_last_n": 2}
    some, _ = top_tokens(client.result(client.sample(sampler, 2, TEXT, **fields)))
    assert some[:-2].tolist() == [[0] * 3] * (len(TEXT) - 2)
    assert some[-2:].tolist() == ids[-2:, :3].tolist()
    single, _ = top_tokens(
        client.result(
            client.sample(sampler, 3, TEXT[:1], **{**fields, "prompt_logprobs_last_n": None})
        )
    )
    assert single.tolist() == [[0] * 3]


def test_a_step_with_non_finite_gradients_answers_valid_json(model: Model) -> None:
    client = model.client
    client.result(model.backward([policy_datum(3e38)], "importance_sampling"))
    promise = model.step(**ADAM)
    response = client.http.post("retrieve_future", json={"request_id": promise["request_id"]})

    def reject(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    metrics = json.loads(response.content, parse_constant=reject)["metrics"]
    assert metrics["skipped_steps"] == 1
    assert not math.isfinite(float(metrics["grad_norm"]))


LOW_ABOVE_HIGH = [
    ({}, {"clip_low_threshold": 1.3}, "1.3 is above .*1.2"),
    ({}, {"clip_high_threshold": 0.5}, "0.8 is above .*0.5"),
    ({"clip_low_threshold": [0.5] * 5 + [1.5]}, {}, r"datum 0: .*1.5 .*\[5\].* is above .*1.2"),
    ({"clip_low_threshold": [0.9] * 6, "clip_high_threshold": [1.0] * 5 + [0.1]}, {}, "0.1"),
]


@pytest.mark.parametrize("loss", ["ppo", "cispo", "gspo"])
@pytest.mark.parametrize(("inputs", "settings", "text"), LOW_ABOVE_HIGH)
def test_a_low_clipping_threshold_above_the_high_one_is_rejected(
    model: Model, loss: str, inputs: Any, settings: Any, text: str
) -> None:
    row = policy_datum(**inputs, sequence_ratio_mask=[1.0] * 6)
    with pytest.raises(FailedError, match=f"user: .*{text}"):
        model.client.result(model.backward([row], loss, **settings))


def test_a_model_that_would_train_nothing_is_rejected(client: Client, server: Server) -> None:
    base, parts = server[0].base_model, ("train_attn", "train_mlp", "train_unembed")
    for seq, trained in enumerate(((), ("train_unembed",))):  # no adapter is at the head
        lora = {part: part in trained for part in parts}
        with pytest.raises(FailedError, match="user: .*would train nothing"):
            client.model(base, seq, **lora)
    assert client.model(base, 2, train_mlp=False, train_unembed=False).train()["grad_norm"] > 0


def test_a_checkpoint_is_saved_loaded_exported_listed_and_deleted(
    model: Model, server: Server, tmp_path: Path
) -> None:
    client, work_queue = model.client, server[0]
    model.train()
    path = model.save(path="one", user_metadata={"renderer_name": "plain"})["path"]
    assert path == f"tinker://{model.name}/weights/one"
    resumed, without_optimizer = client.load(path, True, 1), client.load(path, False, 2)
    metrics = []
    for trained in (model, resumed, without_optimizer):
        trained.train()
        metrics.append(outputs(client.result(trained.backward([datum()]))))
    assert metrics[0] == metrics[1] != metrics[2]

    saved = find_saved_model(work_queue.checkpoints.folder / model.name / "weights" / "one")
    saved.export(tmp_path / "out")
    assert (tmp_path / "out" / "config.json").is_file()

    with pytest.raises(FailedError, match="Set overwrite=true to replace it"):
        model.save(path="one")
    model.save(path="one", overwrite=True, ttl_seconds=3600)
    (listed,) = client.get(f"training_runs/{model.name}/checkpoints")["checkpoints"]
    assert listed["checkpoint_id"] == "weights/one"
    assert listed["expires_at"] is not None
    assert listed["user_metadata"] is None
    run = client.get(f"training_runs/{model.name}")
    assert (run["lora_rank"], run["last_checkpoint"]["tinker_path"]) == (4, path)
    assert client.post("weights_info", tinker_path=path)["lora_rank"] == 4
    assert client.http.delete(f"training_runs/{model.name}/checkpoints/weights/one").is_success
    assert client.http.get(f"training_runs/{model.name}/checkpoints").json() == {"checkpoints": []}


def test_saved_sampler_weights_are_available_after_a_restart(
    tiny_dir: Path, tmp_path: Path
) -> None:
    config = config_of(tiny_dir / "model", tmp_path)
    params = {"sampling_params": {"max_tokens": 8, "seed": 2}}
    with served(config) as (work_queue, url), Client(url) as client:
        model = client.model(work_queue.base_model)
        model.train()
        path = model.save("save_weights_for_sampler", path="s")["path"]
        expected = client.draw(client.sampler(model_path=path), 1, TEXT, **params)
    with served(config) as (_, url), Client(url) as client:
        sampler = client.sampler(model_path=path)
        assert client.get(f"samplers/{sampler}")["model_path"] == path
        assert client.draw(sampler, 1, TEXT, **params) == expected
        base = client.sampler(base_model=str(tiny_dir / "model"))
        assert client.draw(base, 1, TEXT, **params) != expected
        with pytest.raises(FailedError, match="410: the request"):
            client.result({"request_id": f"{model.name}:request:1"})


def test_adapters_beyond_the_memory_limit_are_read_from_disk(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = model.client
    monkeypatch.setattr(training_ops, "ADAPTERS_IN_MEMORY", 1)
    params = {"sampling_params": {"max_tokens": 8, "seed": 2}}
    samples = {}
    for number in range(3):
        model.train()
        sampler = model.sampler(number)
        samples[sampler] = client.draw(sampler, 1, TEXT, **params)
    for sampler, expected in samples.items():
        assert client.draw(sampler, 2, TEXT, **params) == expected


def test_a_deleted_sampler_does_not_fail_other_requests(model: Model, server: Server) -> None:
    client, path = model.client, model.save("save_weights_for_sampler", path="gone")["path"]
    deleted, base = client.sampler(model_path=path), client.sampler(base_model=server[0].base_model)
    client.http.delete(f"training_runs/{model.name}/checkpoints/sampler_weights/gone")
    lost, healthy = (client.sample(sampler, 1, TEXT) for sampler in (deleted, base))
    with pytest.raises(FailedError, match="user: there is no checkpoint tinker://.*/gone"):
        client.result(lost)
    assert sequences(client.result(healthy))


BAD_SAMPLES = [
    ({"sampling_params": {"max_tokens": 17}}, "max_tokens=17 exceeds the 16 tokens"),
    ({"sampling_params": {"temperature": -1}}, "sampling_params.temperature='-1'"),
    ({"sampling_params": {"stop": [-3]}}, "sampling_params.stop"),
    ({"topk_prompt_logprobs": -1}, "topk_prompt_logprobs"),
    ({"topk_prompt_logprobs": 129}, "topk_prompt_logprobs"),
    ({"topk_sample_logprobs": 3}, "topk_sample_logprobs"),
    ({"prompt": {"chunks": [{"type": "dmel"}]}}, "prompt.chunks.0.encoded_text.tokens"),
    ({"prompt": {"chunks": [{"type": "image"}]}}, "prompt.chunks.0.image.data"),
    ({"prompt": {"chunks": []}}, r"has 0 tokens; 1 to 32 fit \(data.max_prompt_length\)"),
    ({"prompt": {"chunks": [{"tokens": [10**6]}]}}, "1000000 at .0. is outside the vocabulary"),
    ({"prompt_logprobs_last_n": 9}, "prompt_logprobs_last_n=9"),
    ({"sampling_session_id": "none"}, "404: there is no open sampler 'none'"),
]


@pytest.mark.parametrize(("fields", "text"), BAD_SAMPLES)
def test_a_bad_sample_request_is_rejected_at_once(
    client: Client, server: Server, fields: dict[str, Any], text: str
) -> None:
    sampler = client.sampler(base_model=server[0].base_model)
    with pytest.raises(FailedError, match=text):
        client.sample(sampler, 1, TEXT, **fields)


BAD_DATUMS = [
    ([], "cross_entropy", "the request has no datums"),
    ([datum()], "ppo", "the loss ppo needs loss_fn_inputs.'logprobs'"),
    ([datum()], "nope", "the actor has no loss 'nope'. Known: cross_entropy"),
    ([datum()], "stable_reinforce", "no public formula.*--stable-reinforce"),
    ([datum(weights=[1.0])], "cross_entropy", r"weights has shape \[1\] for 6 input tokens"),
    ([datum(weights=[math.nan] * 6)], "cross_entropy", r"datum 0: weights is nan at \[0\]"),
    ([datum([7] * 50)], "cross_entropy", r"49 tokens; 1 to 48 fit \(data.max_prompt_length \+"),
    ([datum([-1, 7])], "cross_entropy", r"datum 0: -1 at \[0\] is outside the vocabulary"),
]


@pytest.mark.parametrize(("datums", "loss", "text"), BAD_DATUMS)
def test_a_bad_training_request_is_named(model: Model, datums: Any, loss: str, text: str) -> None:
    with pytest.raises(FailedError, match=f"user: .*{text}"):
        model.client.result(model.backward(datums, loss))


def test_bad_loss_settings_are_named(model: Model) -> None:
    with pytest.raises(FailedError, match="has no setting 'clip_ratio'; it has clip_low_threshold"):
        model.client.result(model.backward([policy_datum()], "ppo", clip_ratio=0.2))
    with pytest.raises(FailedError, match="must be numbers, but beta='x'"):
        model.client.result(model.backward([policy_datum()], "dro", beta="x"))


def test_a_model_trains_on_after_rejected_requests(
    client: Client, model: Model, server: Server
) -> None:
    base, http = server[0].base_model, client.http
    with pytest.raises(FailedError, match="400: this server has no model 'gpt'"):
        client.model("gpt", 7)
    with pytest.raises(
        FailedError, match="trains adapters of the actor, but the request has rank=0. Use a rank"
    ):
        client.model(base, 8, rank=0)
    with pytest.raises(FailedError, match="adam_params.beta1='1.5'"):
        model.step(beta1=1.5)
    with pytest.raises(FailedError, match="adam_params.momentum"):
        model.step(momentum=1)
    with pytest.raises(FailedError, match="404: there is no checkpoint"):
        client.load(f"tinker://{model.name}/weights/none", False, 9)
    headers = {"content-type": "application/x-protobuf"}
    for content, status in ((b"\xff\xff\xff", 400), (b"x" * (65 * 2**20), 413)):
        answer = http.post("forward_backward", content=content, headers=headers)
        assert answer.status_code == status
        assert answer.json()["detail"]
    for content, text in ((b"{", "Invalid JSON"), (b"[]", "valid dictionary|be an object")):
        with pytest.raises(FailedError, match=f"400: the body=.*{text}"):
            answer_of(http.post("optim_step", content=content))
    for seconds, text in ((5, "or equal to 3600"), (10**12, "or equal to 316224000")):
        with pytest.raises(FailedError, match=f"400: ttl_seconds='{seconds}': .*{text}"):
            model.save(path="short", ttl_seconds=seconds)
    assert http.get("nothing/here").status_code == 404
    # the rejected requests took their turns, and the model goes on
    assert model.train()["grad_norm"] > 0


def test_the_port_accepts_connections_before_the_server_thread_runs(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(self: uvicorn.Server, sockets: list[socket.socket]) -> None:
        pass

    monkeypatch.setattr(uvicorn.Server, "serve", never)
    with open_api(server[0], "127.0.0.1", 0, "") as url:
        socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), 5).close()


def test_requests_behind_a_missing_number_fail_after_the_time_limit() -> None:
    started: list[int] = []
    failed: list[str] = []

    class Promise:
        def fail(self, error: Exception) -> None:
            failed.append(str(error))

    turns: Any = RequestOrder()
    turns.submit(2, Promise(), lambda: started.append(2))
    turns.give_up(3600)
    assert not failed
    turns.give_up(0)
    assert "seq_id 1 did not arrive within 0 s" in failed[0]
    turns.submit(3, Promise(), lambda: started.append(3))
    assert started == [3]
    with pytest.raises(RequestError, match="seq_id 2 was already used"):
        turns.check(2)


def test_the_time_limit_of_a_gap_starts_with_the_first_waiting_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr(pending, "time", SimpleNamespace(monotonic=lambda: now))
    result = PendingResult("")
    turns = RequestOrder()
    turns.submit(1, result, lambda: None)
    now = 1000.0  # the client pauses, then sends two requests in the wrong order
    turns.submit(3, result, lambda: None)
    turns.give_up(120)
    assert turns.next == 2
    now = 1121.0
    turns.give_up(120)
    assert turns.next == 4


def test_a_server_that_is_open_to_other_machines_needs_a_key() -> None:
    with pytest.raises(ConfigError, match="must begin with 'tml-'"):
        check_key("127.0.0.1", "secret")
    with pytest.raises(ConfigError, match="open to other machines"):
        check_key("0.0.0.0", "")


def test_a_server_without_adapters_trains_one_model_at_a_time(
    tiny_dir: Path, tmp_path: Path
) -> None:
    config = config_of(tiny_dir / "model", tmp_path, rank=0)
    with served(config, stable_reinforce="ppo") as (work_queue, url), Client(url) as client:
        model = client.model(work_queue.base_model, rank=0)
        with pytest.raises(FailedError, match="for one model at a time, and a model is open"):
            client.model(work_queue.base_model, 1, rank=0)
        _, metrics = outputs(client.result(model.backward([policy_datum()], "stable_reinforce")))
        assert metrics["loss:sum"] != 0
        client.result(model.step(**ADAM))
        assert client.draw(model.sampler(0), 1, TEXT)
        client.post(f"sessions/{client.session}/finish")
        with Client(url) as other:
            assert other.model(work_queue.base_model, rank=0)


def test_clients_do_not_affect_each_other(client: Client, server: Server) -> None:
    base, params = server[0].base_model, {"sampling_params": {"max_tokens": 8}}

    def script(client: Client, others: list[Model]) -> list[Any]:
        model, results = client.model(base, 50, seed=1), []
        for step in range(3):
            promise = model.backward([policy_datum(0.5), policy_datum(-1.0)], "importance_sampling")
            for other in others:
                other.backward([datum()])
                other.step(learning_rate=0.1)
            results.append(outputs(client.result(promise)))
            results.append(client.result(model.step(**ADAM)))
            sampler = model.sampler(step)
            promises = [client.sample(sampler, seq, TEXT, **params) for seq in (1, 2)]
            results += [sequences(client.result(promise)) for promise in promises]
        return results

    alone = script(client, [])
    with Client(server[1]) as second, Client(server[1]) as third:
        others = [client.model(base, 51, rank=8), second.model(base), third.model(base, rank=1)]
        with Client(server[1]) as fourth:
            assert script(fourth, others) == alone
