"""Pairs: the loss tokens of both sides, errors, and batches."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest

from trainer.data.pairs import PairRow, encode_pair, pair_batch, read_pairs

STATIC = {"prompt": "say a", "chosen": "aa", "rejected": "bbb"}
DIALOGUES = {
    "chosen": "\n\nHuman: say a\n\nAssistant: aa",
    "rejected": "\n\nHuman: say a\n\nAssistant: bb",
}
QUESTION = [{"role": "user", "content": "say a"}]


def assistant(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def in_loss(pair: PairRow, tokenizer: Any) -> list[str]:
    return [tokenizer.decode(side.ids[side.in_loss]) for side in (pair.chosen, pair.rejected)]


def test_a_response_to_a_prompt_is_in_the_loss_with_its_end(tokenizer: Any) -> None:
    end = tokenizer.eos_token
    pair = encode_pair(STATIC, tokenizer)
    assert in_loss(pair, tokenizer) == ["aa" + end, "bbb" + end]
    assert encode_pair(STATIC | {"margin": 2}, tokenizer).margin == 2.0


def test_only_what_differs_in_dialogues_is_in_the_loss(tokenizer: Any) -> None:
    end = tokenizer.eos_token
    pair = encode_pair(DIALOGUES, tokenizer)
    assert in_loss(pair, tokenizer) == ["aa" + end, "bb" + end]
    longer = DIALOGUES | {"rejected": DIALOGUES["chosen"] + "a"}
    assert in_loss(encode_pair(longer, tokenizer), tokenizer) == [end, "a" + end]


def test_chats_may_have_the_prompt_in_front_or_in_a_column(tokenizer: Any) -> None:
    in_front = {"chosen": QUESTION + assistant("aa"), "rejected": QUESTION + assistant("bb")}
    in_column = {"prompt": QUESTION, "chosen": assistant("aa"), "rejected": assistant("bb")}
    first, second = encode_pair(in_front, tokenizer), encode_pair(in_column, tokenizer)
    assert first.chosen.ids.tolist() == second.chosen.ids.tolist()
    chosen, rejected = in_loss(second, tokenizer)
    assert chosen.startswith("aa")
    assert rejected.startswith("bb")


def test_earlier_turns_of_the_assistant_are_not_in_the_loss(tokenizer: Any) -> None:
    earlier = [*QUESTION, *assistant("ab"), *QUESTION]
    pair = encode_pair(
        {"prompt": earlier, "chosen": assistant("aa"), "rejected": assistant("bb")}, tokenizer
    )
    chosen, rejected = in_loss(pair, tokenizer)
    assert (chosen[:2], rejected[:2]) == ("aa", "bb")
    assert "ab" in tokenizer.decode(pair.chosen.ids)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"chosen": None}, "it has no 'chosen'; columns: prompt, rejected"),
        ({"chosen": None, "rejected": None}, "no 'chosen' and no 'rejected'"),
        ({"rejected": "aa"}, "'chosen' and 'rejected' are equal: 'aa'"),
        ({"prompt": ""}, "'chosen': 'prompt' is empty"),
        ({"margin": float("nan")}, "'margin' is nan, not a finite number"),
        ({"chosen": assistant("aa")}, "the response must be a text, unless"),
        (
            {"prompt": QUESTION + assistant("a"), "chosen": QUESTION, "rejected": assistant("b")},
            "'chosen' has no token in the loss",
        ),
        (
            {
                "prompt": QUESTION,
                "chosen": assistant("a"),
                "rejected": [{**assistant("a")[0], "name": "b"}],
            },
            "'chosen' and 'rejected' are equal after tokenization",
        ),
    ],
)
def test_a_bad_pair_is_rejected(change: dict[str, Any], problem: str, tokenizer: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(problem)):
        encode_pair(STATIC | change, tokenizer)


def test_truncated_and_dropped_pairs_are_counted(
    tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    late = STATIC | {"chosen": "a" * 9 + "b", "rejected": "a" * 9 + "c"}
    file = tmp_path / "pairs.jsonl"
    file.write_text("\n".join(map(json.dumps, [STATIC, late])), encoding="utf-8")
    with caplog.at_level(logging.INFO, logger="trainer"):
        rows = read_pairs("data.train_files", str(file), tokenizer, 12)
    assert len(rows) == 1
    assert "2 pairs; 1 truncated to 12 tokens; 1 dropped" in caplog.text


def test_a_csv_file_may_have_margins(tokenizer: Any, tmp_path: Path) -> None:
    file = tmp_path / "pairs.csv"
    file.write_text("prompt,chosen,rejected,margin\nsay a,aa,b,1.5\nsay a,a,b,\n", "utf-8")
    rows = read_pairs("data.train_files", str(file), tokenizer, 32)
    assert [row.margin for row in rows] == [1.5, 0.0]


def test_a_row_of_a_batch_has_both_sides_of_a_pair(tokenizer: Any) -> None:
    rows = [encode_pair(STATIC | {"margin": 0.5}, tokenizer), encode_pair(DIALOGUES, tokenizer)]
    batch = pair_batch(rows, ["p", "q"], tokenizer.pad_token_id)
    assert list(batch.non_tensor_batch["uid"]) == ["p", "q"]
    assert batch.batch["margin"].tolist() == [0.5, 0.0]
    for name in ("input_ids", "attention_mask", "position_ids"):
        assert batch.batch[name].shape[:2] == (2, 2)
    for number, row in enumerate(rows):
        for side, expected in enumerate((row.chosen, row.rejected)):
            length = int(batch.batch["attention_mask"][number, side].sum())
            assert length == len(expected.ids)
            assert batch.batch["input_ids"][number, side, :length].tolist() == list(expected.ids)
            loss = batch.batch["response_mask"][number, side, : length - 1] != 0
            assert loss.tolist() == expected.in_loss[1:].tolist()
