"""The selection among a prompt's samples, against its definition."""

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
    for number, of_prompt in enumerate(scores):
        texts += TEXTS[: len(of_prompt)]
        uids += [f"{number}-0"] * len(of_prompt)
        indices += range(len(of_prompt))
    responses = torch.zeros(len(texts), 4, dtype=torch.int64)
    mask = torch.zeros_like(responses)
    for row, text in enumerate(texts):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        responses[row, : len(ids)] = torch.tensor(ids, dtype=torch.int64)
        mask[row, : len(ids)] = 1
    flat = torch.tensor([score for of_prompt in scores for score in of_prompt])
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
def test_the_best_texts_are_kept(tokenizer: Any, top_k: int, min_score: float | None) -> None:
    draw = random.Random(top_k)
    scores = [[float(draw.randrange(4)) for _ in TEXTS] for _ in range(20)]
    expected = []
    for of_prompt in scores:
        order = sorted(range(len(TEXTS)), key=lambda i: (-of_prompt[i], i))  # noqa: B023
        kept: list[int] = []
        for index in order:
            is_new = TEXTS[index] not in [TEXTS[other] for other in kept]
            is_good = min_score is None or of_prompt[index] >= min_score
            if TEXTS[index] and is_new and is_good and len(kept) < top_k:
                kept.append(index)
        expected += [(TEXTS[index], of_prompt[index]) for index in kept]

    config = SelectionConfig(top_k=top_k, min_score=min_score)
    rows, metrics = select(samples(tokenizer, scores), config, tokenizer)
    assert [(row["response"], row["score"]) for row in rows] == expected
    assert metrics["selection/num_rows"] == len(expected)
    assert metrics["selection/num_empty"] == 20


def test_a_pair_is_best_against_worst_and_equal_scores_make_none(tokenizer: Any) -> None:
    batch = samples(tokenizer, [[1.0, 3.0, 0.0], [2.0, 2.0, 2.0], [0.5, 0.0, 0.0]])
    config = SelectionConfig(format="pairs", min_score=1.0)
    (row,), metrics = select(batch, config, tokenizer)
    assert (row["prompt"], row["chosen"], row["rejected"]) == ("say a", "bb", "aa")
    assert (row["chosen_score"], row["rejected_score"]) == (3.0, 0.0)
    assert metrics["selection/num_equal"] == metrics["selection/num_below_min_score"] == 1


def test_of_a_chat_the_answer_is_a_column_of_its_own(tokenizer: Any) -> None:
    prompt = np.array([{"role": "user", "content": "say a"}], dtype=object)
    batch = samples(tokenizer, [[0.0, 1.0]], prompt)
    (row,), _ = select(batch, SelectionConfig(), tokenizer)
    assert (row["prompt"], row["response"]) == (list(prompt), "bb")
    (row,), _ = select(batch, SelectionConfig(format="pairs"), tokenizer)
    assert (row["prompt"], row["chosen"], row["rejected"]) == (list(prompt), "bb", "aa")


@pytest.mark.parametrize(("cut", "best"), [("keep", "bb"), ("drop", "cc")])
def test_samples_cut_by_the_length_are_kept_or_dropped(cut: str, best: str, tokenizer: Any) -> None:
    batch = samples(tokenizer, [[0.0, 3.0, 0.0, 0.0, 1.0]])
    batch.non_tensor_batch["finish_reason"][1] = "length"
    (row,), metrics = select(batch, SelectionConfig(truncated=cut), tokenizer)
    assert (row["response"], metrics["selection/num_cut"]) == (best, 1)
    (row,), _ = select(batch, SelectionConfig(truncated=cut, format="pairs"), tokenizer)
    assert row["chosen"] == best


def test_a_sample_whose_reward_is_skipped_is_not_chosen(tokenizer: Any) -> None:
    batch = samples(tokenizer, [[5.0, 1.0]])
    batch.non_tensor_batch["reward_extra/skipped"] = np.array([1.0, 0.0])
    (row,), _ = select(batch, SelectionConfig(), tokenizer)
    assert row["response"] == "bb"


def test_scores_that_are_no_numbers_are_refused(tokenizer: Any) -> None:
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
