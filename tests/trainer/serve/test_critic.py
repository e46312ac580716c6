"""Clients train a critic of the server by the verbs of the protocol."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.trainer.serve.clients import (
    ADAM,
    TEXT,
    Client,
    FailedError,
    Model,
    config_of,
    datum,
    outputs,
    policy_datum,
    prompt_log_probs,
    served,
)
from tests.trainer.serve.test_equal_to_verbs import PROMPTS, ragged, reward, rows_of
from trainer.groups.worker_groups import WorkerGroups
from trainer.launch import reproducible_arithmetic
from verl_like.batch.protocol import DataProto
from workers.training.optim import OptimStepSettings

CRITIC = ("placement=split", "role_mapping.critic=values", "resource_pool_spec.values=[1]")
OPTIMIZER = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-12, "weight_decay": 0.0}
STEP = OptimStepSettings(**OPTIMIZER, grad_clip=1.0, ends_update=False)
STEPS, LENGTH = 2, 6
CLIP, MODE = 0.05, "seq-mean-token-mean"
Drawn = list[tuple[list[int], list[int], list[float]]]
"""Prompt, response and log-probs of each row."""


class OverHTTP:
    """A client's actor and critic."""

    def __init__(self, client: Client, base: str, rank: int) -> None:
        self.client = client
        self.actor = client.model(base, 0, seed=11)
        self.critic = client.model("critic", 1, rank=rank)

    def sample(self, step: int) -> Drawn:
        params = {"max_tokens": LENGTH, "stop": [], "seed": step}
        sampler, drawn = self.actor.sampler(step), []
        for number, prompt in enumerate(PROMPTS):
            samples = self.client.draw(sampler, number, prompt, sampling_params=params)
            ((tokens, log_probs, _),) = samples
            drawn.append((prompt, tokens, log_probs))
        return drawn

    def values(self, drawn: Drawn) -> list[list[float]]:
        data = [datum(prompt + tokens) for prompt, tokens, _ in drawn]
        promise = self.critic.backward(data, "verl_like:value", forward_only=True)
        rows, _ = outputs(self.client.result(promise))
        return [row[-LENGTH:] for row in rows]

    def update(self, drawn: Drawn, **columns: list[list[float]]) -> Any:
        """Return the loss, metrics and outputs of the critic's and of the actor's step."""

        def datums(*names: str) -> Any:
            numbers = [padded(drawn, columns[name]) for name in names]
            for (prompt, tokens, _), *row in zip(drawn, *numbers, strict=True):
                yield datum(prompt + tokens, **dict(zip(names, row, strict=True)))

        settings = {"cliprange_value": CLIP, "loss_agg_mode": MODE}
        value_rows = datums("values", "returns", "weights")
        adam = {"learning_rate": OPTIMIZER["lr"], "grad_clip_norm": 1.0}
        promises = [
            self.critic.backward(value_rows, "verl_like:value", **settings),
            self.actor.backward(datums("logprobs", "advantages"), "ppo"),
        ]
        steps = [model.step(**adam) for model in (self.critic, self.actor)]
        results = [outputs(self.client.result(promise)) for promise in promises]
        losses = [metrics["loss:sum"] for _, metrics in results]
        gauges = [results[0][1][f"{name}:mean"] for name in ("vf_clipfrac", "vpred_mean")]
        norms = [self.client.result(step)["metrics"]["grad_norm"] for step in steps]
        return losses, gauges, norms, [row[-LENGTH:] for row in results[0][0]]


class InProcess:
    """The same on worker groups; the critic is the one of PPO."""

    def __init__(self, groups: WorkerGroups, samples: Sequence[Drawn]) -> None:
        self.actor, self.critic, self.samples = groups["actor"], groups["critic"], samples
        self.actor.init_model(0)
        self.critic.init_model(0)
        self.actor.add_state("mine", 4, 11)
        self.actor.use_state("mine")

    def sample(self, step: int) -> Drawn:
        return self.samples[step]

    def values(self, drawn: Drawn) -> list[list[float]]:
        values = self.critic.compute_values(batch_of(drawn)).column("values").rows()
        return [row.tolist()[-LENGTH:] for row in values]

    def update(self, drawn: Drawn, **columns: list[list[float]]) -> Any:
        rows = batch_of(drawn, **{name: columns[name] for name in ("values", "returns")})
        valued = self.critic.forward_backward(rows, "value")
        rows = batch_of(drawn, **{name: columns[name] for name in ("logprobs", "advantages")})
        acted = self.actor.forward_backward(rows, "ppo")
        norms = [group.optim_step(STEP)[0]["grad_norm"] for group in (self.critic, self.actor)]
        losses = [valued.metrics["vf_loss"][0], acted.metrics["loss"][0]]
        gauges = [valued.metrics[name][0] for name in ("vf_clipfrac", "vpred_mean")]
        values = [row.tolist()[-LENGTH:] for row in valued.batch.column("values").rows()]
        return losses, gauges, norms, values


def padded(drawn: Drawn, rows: list[list[float]]) -> list[list[float]]:
    """Return numbers of response tokens as numbers of all tokens after a row's first."""
    pads = [[0.0] * (len(prompt) - 1) for prompt, _, _ in drawn]
    return [pad + row for pad, row in zip(pads, rows, strict=True)]


def batch_of(drawn: Drawn, **columns: list[list[float]]) -> DataProto:
    """Return the rows of a driver; prompts are not in the critic's loss."""
    ids = [prompt + tokens for prompt, tokens, _ in drawn]
    rows = rows_of(ids, **{name: padded(drawn, rows) for name, rows in columns.items()})
    all_columns: dict[str, Any] = {name: rows.column(name) for name in rows.columns}
    if "advantages" not in columns:
        mask = padded(drawn, [[1.0] * LENGTH for _ in drawn])
        all_columns["response_mask"] = ragged(mask, torch.long, max(map(len, ids)) - 1)
    return DataProto.from_dict(all_columns, meta_info={"loss_settings": {}})


def ppo(driver: OverHTTP | InProcess) -> tuple[list[Drawn], list[Any]]:
    """Return the samples, and the metrics and values of each step."""
    samples, results = [], []
    for step in range(STEPS):
        drawn = driver.sample(step)
        # not the values of the model in training, so that some are clipped
        shifts = 2 * CLIP * np.array([[1], [-1], [1]])
        values = (np.asarray(driver.values(drawn)) + shifts).tolist()
        returns = [[reward(tokens)] * LENGTH for _, tokens, _ in drawn]
        gaps = np.subtract(returns, values).tolist()
        results.append(
            driver.update(
                drawn,
                values=values,
                returns=returns,
                weights=[[1.0] * LENGTH for _ in drawn],
                advantages=gaps,
                logprobs=[log_probs for _, _, log_probs in drawn],
            )
        )
        samples.append(drawn)
    results.append(driver.values(samples[-1]))
    return samples, results


def test_a_ppo_loop_over_http_equals_the_verbs_bit_for_bit(tiny_dir: Path, tmp_path: Path) -> None:
    rank = 4
    keys = (*CRITIC, f"critic.model.lora_rank={rank}")
    with served(config_of(tiny_dir / "model", tmp_path / "a", *keys)) as (work_queue, url):
        with Client(url) as client:
            samples, results = ppo(OverHTTP(client, work_queue.base_model, rank))
    plain = (
        "role_workers.critic=workers.roles.critic.CriticWorker",
        f"critic.cliprange_value={CLIP}",
        f"critic.loss_agg_mode={MODE}",
    )
    config = config_of(tiny_dir / "model", tmp_path / "b", *keys, *plain)
    with reproducible_arithmetic(), WorkerGroups(config) as groups:
        assert ppo(InProcess(groups, samples))[1] == results
    assert any(gauges[0] > 0 for _, gauges, _, _ in results[:-1]), "no value was clipped"
    assert results[-1] != results[0][-1], "the critic learned nothing"


@pytest.fixture(scope="module")
def url(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    config = config_of(tiny_dir / "model", tmp_path_factory.mktemp("saved"), *CRITIC)
    with served(config) as (_, address):
        yield address


@pytest.fixture
def client(url: str) -> Iterator[Client]:
    with Client(url) as opened:
        yield opened
        opened.post(f"sessions/{opened.session}/finish")


def returns_of(values: float = 0.0, number: float = 1.0) -> tuple[list[int], dict[str, Any]]:
    count = len(TEXT) - 1
    return datum(values=[values] * count, returns=[number] * count)


def values_of(model: Model) -> list[float]:
    promise = model.backward([datum()], "verl_like:value", forward_only=True)
    (row,), _ = outputs(model.client.result(promise))
    return row


def train(model: Model) -> None:
    model.backward([returns_of()], "verl_like:value", cliprange_value=10.0)
    model.client.result(model.step(**ADAM))


def test_a_loaded_critic_trains_on_as_the_saved_one(client: Client, url: str) -> None:
    critic = client.model("critic", rank=0)
    assert values_of(critic) == [0.0] * (len(TEXT) - 1)
    train(critic)
    path = critic.save(path="state")["path"]
    sampler = critic.sampler(0)
    before = values_of(critic)
    train(critic)
    expected = values_of(critic)
    assert expected != before
    # a sampler keeps its values; entry j is the value before token j
    scores = client.sample(sampler, 1, TEXT, prompt_logprobs=True)
    assert prompt_log_probs(client.result(scores))[1:] == pytest.approx(before, rel=1e-5)
    base = client.sample(client.sampler(base_model="critic"), 1, TEXT, prompt_logprobs=True)
    assert prompt_log_probs(client.result(base))[1:] == [0.0] * (len(TEXT) - 1)

    client.post(f"sessions/{client.session}/finish")
    with Client(url) as second:
        loaded = second.load(path, True, 0)
        assert values_of(loaded) == before
        train(loaded)
        assert values_of(loaded) == expected
        second.post(f"sessions/{second.session}/finish")


def test_bad_requests_of_a_critic_are_rejected(client: Client) -> None:
    models = client.get("get_server_capabilities")["supported_models"]
    assert [(m["trainable"], m["sampleable"]) for m in models] == [(True, True), (True, False)]
    with pytest.raises(
        FailedError,
        match="trains all weights of the critic, but the request has rank=4. Use rank=0",
    ):
        client.model("critic", 0, rank=4)
    critic, actor = client.model("critic", 1, rank=0), client.model(models[0]["model_name"], 2)
    with pytest.raises(FailedError, match="all weights of the critic, for one model at a time"):
        client.model("critic", 3, rank=0)
    with pytest.raises(FailedError, match="does not sample"):
        client.sample(client.sampler(base_model="critic"), 1, TEXT)

    def failure(model: Model, rows: Any, loss: str, **settings: Any) -> str:
        with pytest.raises(FailedError, match="^user: ") as error:
            client.result(model.backward([rows], loss, **settings))
        return str(error.value)

    value = "verl_like:value"
    assert f"the critic has no loss 'ppo'. Known: {value}" in failure(critic, policy_datum(), "ppo")
    assert f"the actor has no loss '{value}'" in failure(actor, returns_of(), value)
    for rows, text in (
        (datum(), "needs loss_fn_inputs['values']"),
        (datum(values=[0.0], returns=[0.0]), "values has shape [1] for 6 input tokens"),
        (returns_of(number=np.nan), "returns is nan at [0]"),
    ):
        assert text in failure(critic, rows, value)
    for settings, text in (
        ({"clip_ratio": 0.2}, "no setting 'clip_ratio'; it has cliprange_value, loss_agg_mode"),
        ({"cliprange_value": -1.0}, "cliprange_value=-1.0: it must be above 0"),
        ({"cliprange_value": np.nan}, "cliprange_value is NaN"),
        ({"cliprange_value": "wide"}, "cliprange_value='wide' must be a number"),
        ({"loss_agg_mode": "sum"}, "loss_agg_mode=sum: choose one of"),
    ):
        assert text in failure(critic, returns_of(), value, **settings)
    with pytest.raises(FailedError, match="user: no optimizer step was run"):
        client.result(critic.step(**ADAM))
    train(critic)
    assert values_of(critic) != [0.0] * (len(TEXT) - 1)
