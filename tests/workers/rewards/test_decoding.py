"""Rows of ids are decoded all at once, to the texts of the tokenizer itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer.cli.make_tiny import make_tokenizer
from trainer.rollouts.rollouts import with_responses
from trainer.rollouts.samples import write_samples
from verl_like.batch.columns import object_rows
from verl_like.batch.protocol import DataProto
from workers.rewards.manager import decode_responses, decode_rows, reward_samples


@pytest.fixture
def tokenizer() -> Any:
    return make_tokenizer()


def test_texts_match_the_tokenizers(tokenizer: Any) -> None:
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, len(tokenizer), (20, 30), generator=draw).tolist()
    rows = [[], [tokenizer.eos_token_id], *[row[:length] for length, row in enumerate(ids)]]
    assert decode_rows(tokenizer, rows) == tokenizer.batch_decode(rows, skip_special_tokens=True)


def test_a_tokenizer_with_its_own_decode_uses_it(tokenizer: Any) -> None:
    base = type(tokenizer)

    def decode_upper(self: Any, *arguments: Any, **settings: Any) -> str:
        return str(base._decode(self, *arguments, **settings)).upper()

    tokenizer.__class__ = type("Upper", (base,), {"_decode": decode_upper})
    rows = [tokenizer("abc", add_special_tokens=False)["input_ids"]]
    assert decode_rows(tokenizer, rows) == ["ABC"]


def scored_batch(tokenizer: Any) -> DataProto:
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


def test_all_rewards_and_the_sample_log_share_one_decoding(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, calls = scored_batch(tokenizer), []

    def counted(*arguments: Any) -> list[str]:
        calls.append(arguments)
        return decode_rows(*arguments)

    monkeypatch.setattr("workers.rewards.manager.decode_rows", counted)
    for _ in range(2):
        assert [row["solution_str"] for row in reward_samples(batch, tokenizer)] == list("abcd")
    write_samples(tmp_path, 1, batch[torch.tensor([3, 0])], tokenizer)
    lines = (tmp_path / "1.jsonl").read_text().splitlines()
    assert [json.loads(line)["output"] for line in lines] == ["d", "a"]
    assert len(calls) == 1


def test_new_responses_are_decoded_again(tokenizer: Any) -> None:
    batch = scored_batch(tokenizer)
    decode_responses(batch, tokenizer)
    columns = {name: torch.zeros(4, 1) for name in ("input_ids", "position_ids", "attention_mask")}
    prompts = batch.select(["sample_index"]).union(DataProto.from_dict(columns))
    flipped = {name: batch.batch[name].flip(0) for name in ("responses", "response_mask")}
    generated = with_responses(prompts, DataProto.from_dict(flipped))
    assert decode_responses(generated, tokenizer) == list("dcba")
