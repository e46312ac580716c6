"""The selection among the samples of a prompt, against its definition."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trainer.best_of_n.recipe import SelectionConfig
from trainer.best_of_n.selection import read_rows, select, write_rows
from trainer.data.files import rows_of_files
from verl_like.batch.columns import object_rows
from verl_like.batch.protocol import DataProto
from verl_like.errors import BatchError

TEXTS = ["aa", "bb", "aa", "", "cc", "dd"]


def samples(tokenizer: Any, scores: list[list[float]], prompt: Any = "say a") -> DataProto:
    """Return a prompt for each list of scores; its samples have the first of `TEXTS`."""
    texts, uids, indices = [], [], []
    for number, prompt_scores in enumerate(scores):
        texts += TEXTS[: len(prompt_scores)]
        uids += [f"{number}-0"] * len(prompt_scores)
        indices += range(len(prompt_scores))
    responses = torch.zeros(len(texts), 4, dtype=torch.int64)
    mask = torch.zeros_like(responses)
    for row, text in enumerate(texts):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        responses[row, : len(ids)] = torch.tensor(ids, dtype=torch.int64)
        mask[row, : len(ids)] = 1
    flat = torch.tensor([score for prompt_scores in scores for score in prompt_scores])
    return DataProto.from_dict(
        {
            "responses": responses,
            "response_mask": mask,
            "token_level_scores": torch.nn.functional.pad(flat[:, None], (0, 3)),
            "sample_index": torch.tensor(indices),
        },
        {
            "uid": object_rows(uids),
            "raw_prompt": object_rows([prompt] * len(texts)),
            "data_source": object_rows(["letters"] * len(texts)),
            "finish_reason": object_rows(["stop"] * len(texts)),
            "reward_extra/style": np.linspace(0, 1, len(texts)),
        },
    )


@pytest.mark.parametrize("top_k", [1, 2, 9])
@pytest.mark.parametrize("min_score", [None, 1.0])
def test_the_best_responses_are_selected(
    tokenizer: Any, top_k: int, min_score: float | None
) -> None:
    draw = random.Random(top_k)
    scores = [[float(draw.randrange(4)) for _ in TEXTS] for _ in range(20)]
    expected = []
    for prompt_scores in scores:
        best: dict[str, float] = {}
        for score, text in sorted(
            zip(prompt_scores, TEXTS, strict=True), key=lambda pair: -pair[0]
        ):
            is_good = min_score is None or score >= min_score
            if text and text not in best and is_good and len(best) < top_k:
                best[text] = score
        expected += best.items()

    config = SelectionConfig(top_k=top_k, min_score=min_score)
    rows, metrics = select(samples(tokenizer, scores), config, tokenizer)
    assert [(row["response"], row["score"]) for row in rows] == expected
    assert metrics["selection/num_rows"] == len(expected)
    assert metrics["selection/num_empty"] == 20


def test_a_pair_is_the_best_and_the_worst_of_different_scores(tokenizer: Any) -> None:
    batch = samples(tokenizer, [[1.0, 3.0, 0.0], [2.0, 2.0, 2.0], [0.5, 0.0, 0.0]])
    config = SelectionConfig(format="pairs", min_score=1.0)
    (row,), metrics = select(batch, config, tokenizer)
    assert (row["prompt"], row["chosen"], row["rejected"]) == ("say a", "bb", "aa")
    assert (row["chosen_score"], row["rejected_score"]) == (3.0, 0.0)
    assert metrics["selection/num_equal"] == metrics["selection/num_below_min_score"] == 1


def test_prompt_and_response_of_a_chat_are_separate_columns(tokenizer: Any) -> None:
    prompt = np.array([{"role": "user", "content": "say a"}], dtype=object)
    batch = samples(tokenizer, [[0.0, 1.0]], prompt)
    (row,), _ = select(batch, SelectionConfig(), tokenizer)
    assert (row["prompt"], row["response"]) == (list(prompt), "bb")
    (row,), _ = select(batch, SelectionConfig(format="pairs"), tokenizer)
    assert (row["prompt"], row["chosen"], row["rejected"]) == (list(prompt), "bb", "aa")


@pytest.mark.parametrize(("cut", "best"), [("keep", "bb"), ("drop", "cc")])
def test_truncated_samples_are_kept_or_dropped(cut: str, best: str, tokenizer: Any) -> None:
    batch = samples(tokenizer, [[0.0, 3.0, 0.0, 0.0, 1.0]])
    batch.non_tensor_batch["finish_reason"][1] = "length"
    (row,), metrics = select(batch, SelectionConfig(truncated=cut), tokenizer)
    assert (row["response"], metrics["selection/num_cut"]) == (best, 1)
    (row,), _ = select(batch, SelectionConfig(truncated=cut, format="pairs"), tokenizer)
    assert row["chosen"] == best


def test_a_sample_with_a_skipped_reward_is_not_selected(tokenizer: Any) -> None:
    batch = samples(tokenizer, [[5.0, 1.0]])
    batch.non_tensor_batch["reward_extra/skipped"] = np.array([1.0, 0.0])
    (row,), _ = select(batch, SelectionConfig(), tokenizer)
    assert row["response"] == "bb"


def test_nan_scores_are_rejected(tokenizer: Any) -> None:
    batch = samples(tokenizer, [[1.0, 2.0], [float("nan"), 1.0]])
    with pytest.raises(BatchError, match="1 of 4 samples are nan or infinite.*uid 1-0"):
        select(batch, SelectionConfig(), tokenizer)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_files_keep_all_characters_and_optional_numbers(tmp_path: Path, name: str) -> None:
    rows = [
        {"response": "one\u2028line\n", "rewards": None},
        {"response": "ä", "rewards": {"style": 0.5}},
    ]
    write_rows(tmp_path / name, rows)
    assert [row for _, row in rows_of_files([str(tmp_path / name)], "selection.file")] == rows
    if name.endswith(".jsonl"):
        assert read_rows(tmp_path / name) == rows
