"""A reference and a reward model that the configuration places score rows under their names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaForSequenceClassification

from tests.trainer.serve.clients import (
    TEXT,
    Client,
    FailedError,
    config_of,
    prompt_log_probs,
    served,
    top_tokens,
)

KEYS = [
    "role_mapping.ref=ref_pool",
    "resource_pool_spec.ref_pool=[1]",
    "role_mapping.reward_model=reward_pool",
    "resource_pool_spec.reward_pool=[1]",
    "reward.model.enable=true",
]


def test_reference_and_reward_model_score(tiny_dir: Path, classifier: Path, tmp_path: Path) -> None:
    keys = [*KEYS, f"reward.model.path={classifier}"]
    config = config_of(tiny_dir / "model", tmp_path, "placement=split", *keys)
    with served(config) as (work_queue, url), Client(url) as client:

        def score(sampler: str, rows: Sequence[list[int]]) -> list[list[float]]:
            promises = [
                client.sample(sampler, number, row, prompt_logprobs=True)
                for number, row in enumerate(rows)
            ]
            return [prompt_log_probs(client.result(promise)) for promise in promises]

        rows = [TEXT, TEXT[:4]]
        base = score(client.sampler(base_model=work_queue.base_model), rows)
        model = client.model(work_queue.base_model)
        model.train()
        reference = client.sampler(base_model="ref")
        for scored, expected in zip(score(reference, rows), base, strict=True):
            assert scored[1:] == pytest.approx(expected[1:], rel=1e-5)
        top = {"prompt_logprobs": True, "topk_prompt_logprobs": 3}
        (ids, log_probs), (base_ids, _) = (
            top_tokens(client.result(client.sample(sampler, 5, TEXT, **top)))
            for sampler in (reference, client.sampler(base_model=work_queue.base_model))
        )
        assert ids.tolist() == base_ids.tolist()
        assert (log_probs[1:, 0] >= np.asarray(base[0][1:]) - 1e-4).all()
        with pytest.raises(FailedError, match="400: the role ref does not sample"):
            client.sample(reference, 9, TEXT)

        with pytest.raises(
            FailedError, match="user: the role reward_model has no likeliest tokens"
        ):
            client.result(client.sample(client.sampler(base_model="reward_model"), 5, TEXT, **top))

        long_row = TEXT * 6  # longer than a prompt of a sample
        scores = score(client.sampler(base_model="reward_model"), [*rows, long_row])
        hf = LlamaForSequenceClassification.from_pretrained(classifier)
        for scored, row in zip(scores, [*rows, long_row], strict=True):
            assert len(scored) == len(row)
            assert np.isnan(scored[:-1]).all()
            assert scored[-1] == pytest.approx(hf(torch.tensor([row])).logits.item(), abs=1e-4)
