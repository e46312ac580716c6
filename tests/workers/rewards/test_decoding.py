"""Rows of ids are decoded all at once, to the texts of the tokenizer itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from trainer.data.prompts import load_tokenizer
from trainer.rollouts.rollouts import with_responses
from trainer.rollouts.samples import write_samples
from verl_like.batch.columns import object_rows
from verl_like.batch.protocol import DataProto
from workers.rewards.manager import decode_responses, decode_rows, samples_of


@pytest.fixture
def tokenizer(tiny_dir: Path) -> Any:
    return load_tokenizer(str(tiny_dir / "model"))


def test_texts_are_those_of_the_tokenizer(tokenizer: Any) -> None:
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, len(tokenizer), (20, 30), generator=draw).tolist()
    rows = [[], [tokenizer.eos_token_id], *[row[:length] for length, row in enumerate(ids)]]
    assert decode_rows(tokenizer, rows) == tokenizer.batch_decode(rows, skip_special_tokens=True)


def test_a_tokenizer_that_decodes_in_its_own_way_does_so(tokenizer: Any) -> None:
    own = type(tokenizer)

    def shout(self: Any, *arguments: Any, **settings: Any) -> str:
        return str(own._decode(self, *arguments, **settings)).upper()

    tokenizer.__class__ = type("Shouts", (own,), {"_decode": shout})
    rows = [tokenizer("abc", add_special_tokens=False)["input_ids"]]
    assert decode_rows(tokenizer, rows) == ["ABC"]


def scored(tokenizer: Any) -> DataProto:
    ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"] for text in "abcd"])
    return DataProto.from_dict(
        {
            "prompts": ids,
            "attention_mask": torch.ones(4, 2, dtype=torch.int64),
            "responses": ids,
            "response_mask": torch.ones_like(ids),
            "token_level_scores": torch.zeros(4, 1),
            "sample_index": torch.zeros(4, dtype=torch.int64),
        },
        {
            "uid": object_rows(list("wxyz")),
            "data_source": object_rows(["letters"] * 4),
            "reward_model": object_rows([{"ground_truth": ""}] * 4),
            "extra_info": object_rows([{}] * 4),
        },
    )


def test_a_batch_is_decoded_once_for_all_rewards_and_its_file(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, decoded = scored(tokenizer), []

    def counted(*given: Any) -> list[str]:
        decoded.append(given)
        return decode_rows(*given)

    monkeypatch.setattr("workers.rewards.manager.decode_rows", counted)
    for _ in range(2):
        assert [one["solution_str"] for one in samples_of(batch, tokenizer)] == list("abcd")
    write_samples(tmp_path, 1, batch[torch.tensor([3, 0])], tokenizer)
    lines = (tmp_path / "1.jsonl").read_text().splitlines()
    assert ['"output": "d"' in lines[0], '"output": "a"' in lines[1]] == [True, True]
    assert len(decoded) == 1


def test_new_responses_have_texts_of_their_own(tokenizer: Any) -> None:
    batch = scored(tokenizer)
    decode_responses(batch, tokenizer)
    prompts = batch.select(["sample_index"])
    flipped = DataProto.from_dict(
        {
            "responses": batch.batch["responses"].flip(0),
            "response_mask": batch.batch["response_mask"],
        }
    )
    again = with_responses(
        prompts.union(
            DataProto.from_dict({name: torch.zeros(4, 1) for name in ("input_ids", "position_ids")})
        ).union(DataProto.from_dict({"attention_mask": torch.ones(4, 1)})),
        flipped,
    )
    assert decode_responses(again, tokenizer) == list("dcba")
