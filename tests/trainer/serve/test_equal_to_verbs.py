"""A client's GRPO loop gives the bits of the same verbs in process, on any placement."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.trainer.serve.clients import Client, FailedError, config_of, outputs, sequences, served
from trainer.groups.worker_groups import WorkerGroups
from trainer.launch import reproducible_arithmetic
from verl_like.batch.protocol import DataProto
from verl_like.batch.ragged import RaggedTensor
from workers.training.optim import OptimStepSettings
from workers.weights.sync import sync_weights

PROMPTS = [[7, 9, 11], [13, 8, 6, 21, 5], [30]]
GROUP, STEPS, LENGTH, RATE = 4, 2, 6, 1e-2
Sampled = tuple[list[int], list[float]]


def reward(tokens: Sequence[int]) -> float:
    return float(sum(token % 2 for token in tokens)) / LENGTH


def advantages(group: Sequence[Sampled]) -> list[float]:
    rewards = [reward(tokens) for tokens, _ in group]
    mean, deviation = np.mean(rewards), np.std(rewards)
    return [float((value - mean) / (deviation + 1e-6)) for value in rewards]


def over_http(url: str, base: str, rank: int) -> tuple[list[Any], list[Any]]:
    """Return (metrics and samples of each step, final log-probs) of the client's loop."""
    results: list[Any] = []
    with Client(url) as client:
        model = client.model(base, rank=rank, seed=11)
        for step in range(STEPS):
            sampler = model.sampler(step)
            params = {"max_tokens": LENGTH, "temperature": 0.9, "stop": [], "seed": 0}
            promises = [
                client.sample(
                    sampler,
                    number,
                    prompt,
                    num_samples=GROUP,
                    sampling_params={**params, "seed": 100 * step + number},
                )
                for number, prompt in enumerate(PROMPTS)
            ]
            groups = [[s[:2] for s in sequences(client.result(promise))] for promise in promises]
            datums = []
            for prompt, group in zip(PROMPTS, groups, strict=True):
                for (tokens, log_probs), advantage in zip(group, advantages(group), strict=True):
                    row, pad = prompt + tokens, [0.0] * (len(prompt) - 1)
                    inputs = {
                        "target_tokens": row[1:],
                        "logprobs": pad + log_probs,
                        "advantages": pad + [advantage] * len(tokens),
                    }
                    datums.append((row[:-1], inputs))
            backward = model.backward(datums, "ppo", clip_high_threshold=1.3)
            stepped = model.step(learning_rate=RATE, grad_clip_norm=1.0, weight_decay=0.01)
            rows, metrics = outputs(client.result(backward))
            results.append((groups, rows, metrics["loss:sum"], client.result(stepped)["metrics"]))
        final = [([*p, *p][:-1], {"target_tokens": [*p, *p][1:]}) for p in PROMPTS]
        ends, _ = outputs(client.result(model.backward(final, forward_only=True)))
    return results, ends


def ragged(rows: Sequence[Sequence[float]], dtype: torch.dtype, width: int) -> RaggedTensor:
    return RaggedTensor.from_rows([torch.tensor(row, dtype=dtype) for row in rows], width)


def rows_of(ids: list[list[int]], **numbers: list[list[float]]) -> DataProto:
    """Return rows in which every token but the first is in the loss."""
    width = max(map(len, ids))
    tokens = ragged(ids, torch.long, width)
    responses = ragged([row[1:] for row in ids], torch.long, width - 1)
    positions = torch.cat([torch.arange(len(row)) for row in ids])
    columns: dict[str, Any] = {
        "input_ids": tokens,
        "attention_mask": tokens.with_values(torch.ones_like(tokens.values)),
        "position_ids": tokens.with_values(positions),
        "responses": responses,
        "response_mask": responses.with_values(torch.ones_like(responses.values)),
    }
    for name, rows in numbers.items():
        columns[name] = ragged(rows, torch.float32, width - 1)
    settings = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.3}
    return DataProto.from_dict(columns, meta_info={"loss_settings": settings})


def in_process(config: Any, rank: int) -> tuple[list[Any], list[Any]]:
    """Run the same loop as a driver of the verbs."""
    results: list[Any] = []
    with reproducible_arithmetic(), WorkerGroups(config) as groups:
        actor, rollout = groups["actor"], groups["rollout"]
        actor.init_model(0)
        rollout.init_model()
        actor.add_state("mine", rank, 11)
        actor.use_state("mine")
        for step in range(STEPS):
            sync_weights(actor, rollout, step + 1)
            prompts = [torch.tensor(p) for p in PROMPTS for _ in range(GROUP)]
            ids = RaggedTensor.from_rows(prompts, config.data.max_prompt_length, at_end=True)
            sampling = {"temperature": 0.9, "max_tokens": LENGTH, "stop_token_ids": ()}
            batch = rollout.generate_sequences(
                DataProto.from_dict(
                    {
                        "input_ids": ids,
                        "attention_mask": ids.with_values(torch.ones_like(ids.values)),
                        "sample_index": torch.arange(GROUP).repeat(len(PROMPTS)),
                        "end_at": torch.full((len(prompts),), LENGTH),
                    },
                    {
                        "uid": [
                            f"seed {100 * step + n}"
                            for n in range(len(PROMPTS))
                            for _ in range(GROUP)
                        ]
                    },
                    {"sampling": sampling, "pad_token_id": 0},
                )
            )
            tokens = [row.tolist() for row in batch.column("responses").rows()]
            log_probs = [row.tolist() for row in batch.column("rollout_log_probs").rows()]
            drawn = list(zip(tokens, log_probs, strict=True))
            of_prompts = [drawn[n * GROUP : (n + 1) * GROUP] for n in range(len(PROMPTS))]
            rows, sampled, scaled = [], [], []
            for prompt, group in zip(PROMPTS, of_prompts, strict=True):
                pad = [0.0] * (len(prompt) - 1)
                for (response, numbers), advantage in zip(group, advantages(group), strict=True):
                    rows.append(prompt + response)
                    sampled.append(pad + numbers)
                    scaled.append(pad + [advantage] * len(response))
            batch = rows_of(rows, logprobs=sampled, advantages=scaled)
            result = actor.forward_backward(batch, "ppo")
            settings = OptimStepSettings(
                lr=RATE,
                betas=(0.9, 0.95),
                eps=1e-12,
                weight_decay=0.01,
                grad_clip=1.0,
                ends_update=False,
            )
            metrics = actor.optim_step(settings)[0]
            outputs_of_rows = [row.tolist() for row in result.batch.column("log_probs").rows()]
            loss = result.metrics["loss"][0]
            results.append((of_prompts, outputs_of_rows, loss, metrics))
        final = actor.forward(rows_of([[*p, *p] for p in PROMPTS]), ("log_probs",))
        ends = [row.tolist() for row in final.column("log_probs").rows()]
    return results, ends


@pytest.mark.parametrize(("rank", "placement"), [(0, "split"), (4, "colocate")])
def test_grpo_over_http_equals_the_verbs_bit_for_bit(
    tiny_dir: Path, tmp_path: Path, rank: int, placement: str
) -> None:
    model = tiny_dir / "model"
    config = config_of(model, tmp_path / "a", rank=rank)
    expected = in_process(config, rank)
    served_config = config_of(model, tmp_path / "b", f"placement={placement}", rank=rank)
    with served(served_config) as (work_queue, url):
        assert over_http(url, work_queue.base_model, rank) == expected
    rewards = [np.mean([reward(t) for group in step[0] for t, _ in group]) for step in expected[0]]
    assert len(set(rewards)) == STEPS, "nothing was learned or sampled again"


@pytest.mark.ray
def test_grpo_on_ray_equals_the_verbs_bit_for_bit(
    tiny_dir: Path, tmp_path: Path, ray_session: None
) -> None:
    model = tiny_dir / "model"
    expected = in_process(config_of(model, tmp_path / "a", rank=4), 4)
    on_ray = ("trainer.backend=ray", "placement=split", "trainer.n_gpus_per_node=2")
    config = config_of(model, tmp_path / "b", *on_ray, "cpus_per_process=0.5", rank=4)
    with served(config) as (work_queue, url):
        assert work_queue.overlaps
        assert over_http(url, work_queue.base_model, 4) == expected
        with Client(url) as client:
            idle = client.model(work_queue.base_model)
            with pytest.raises(FailedError, match="user: .*there are no gradients"):
                client.result(idle.step())
