"""The tokens of a row in the loss of a language model, and the order of rows."""

from __future__ import annotations

import json
import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from trainer.data.lm_rows import LMRow, encode_lm_row, lm_batch, read_lm_rows
from trainer.data.loader import RowLoader
from trainer.data.prompt_tokens import encode_prompt
from trainer.data.prompts import load_tokenizer
from verl_like.errors import CheckpointError, ConfigError

CHAT = [
    {"role": "user", "content": "say a"},
    {"role": "assistant", "content": "aaa"},
    {"role": "user", "content": "again"},
    {"role": "assistant", "content": "ab"},
]
TURNS = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.role == 'assistant' %}BEGIN{{ m.content }}!END{% else %}{{ m.content }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
PLAIN = TURNS.replace("BEGIN", "").replace("END", "")
MARKED = TURNS.replace("BEGIN", "{% generation %}").replace("END", "{% endgeneration %}")
CUT_TURNS = ("{{ m.content }}!", "{{ m.content if loop.last else m.content[:1] }}!")


@pytest.fixture
def tokenizer(tiny_dir: Path) -> Any:
    """One token per character, so that texts can be read off masks."""
    return load_tokenizer(str(tiny_dir / "model"))


def runs_of_text(row: dict[str, Any], tokenizer: Any) -> list[tuple[bool, str]]:
    """Return the row's text in runs inside and outside the loss."""
    encoded = encode_lm_row(row, tokenizer)
    runs: list[tuple[bool, list[int]]] = []
    for token, inside in zip(encoded.ids.tolist(), encoded.in_loss.tolist(), strict=True):
        if not runs or runs[-1][0] != inside:
            runs.append((inside, []))
        runs[-1][1].append(token)
    return [(inside, tokenizer.decode(ids)) for inside, ids in runs]


def write(path: Path, *rows: Any) -> str:
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return str(path)


def test_every_token_of_a_text_and_its_end_is_in_the_loss(tokenizer: Any) -> None:
    assert runs_of_text({"text": "abc d"}, tokenizer) == [(True, "abc d<eos>")]


def test_only_the_response_to_a_prompt_is_in_the_loss(tokenizer: Any) -> None:
    row = {"prompt": "say a", "response": "aaa"}
    assert runs_of_text(row, tokenizer) == [(False, "say a"), (True, "aaa<eos>")]
    chat = {"prompt": CHAT[:1], "response": "aaa<eos>"}
    assert runs_of_text(chat, tokenizer) == [
        (False, "<bos><user>say a<assistant>"),
        (True, "aaa<eos>"),
    ]


def test_only_the_assistant_s_turns_of_a_chat_are_in_the_loss(tokenizer: Any) -> None:
    assert runs_of_text({"messages": CHAT}, tokenizer) == [
        (False, "<bos><user>say a<assistant>"),
        (True, "aaa<eos>"),
        (False, "<user>again<assistant>"),
        (True, "ab<eos>"),
    ]


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["plain", "with generation markers"])
def test_a_template_that_does_not_end_the_assistant_s_turn_is_reported(
    tokenizer: Any, tmp_path: Path, template: str, caplog: pytest.LogCaptureFixture
) -> None:
    file = write(tmp_path / "chats.jsonl", {"messages": CHAT}, {"messages": CHAT[:2]})
    read_lm_rows("data.train_files", file, tokenizer, 64)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    tokenizer.chat_template = template
    read_lm_rows("data.train_files", file, tokenizer, 64)
    (warning,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert warning.startswith("data.train_files: 2 of 2 rows have none of the model's stop tokens")
    assert "('<eos>', '<eos>')" not in warning
    assert "{{ eos_token }} after an assistant's message (within its {% generation %}" in warning


def test_rows_of_trl_have_the_completion_in_the_loss(tokenizer: Any) -> None:
    text = encode_lm_row({"prompt": "say a", "completion": "aaa"}, tokenizer)
    same = encode_lm_row({"prompt": "say a", "response": "aaa"}, tokenizer)
    assert (text.ids.tolist(), text.in_loss.tolist()) == (same.ids.tolist(), same.in_loss.tolist())
    # the prompt has a turn of the assistant, which is not in the loss
    row = encode_lm_row({"prompt": CHAT[:3], "completion": CHAT[3:]}, tokenizer)
    chat = encode_lm_row({"messages": CHAT}, tokenizer)
    assert row.ids.tolist() == chat.ids.tolist()
    begin = len(encode_prompt(CHAT[:3], tokenizer))
    assert row.in_loss.tolist() == [False] * begin + chat.in_loss[begin:].tolist()
    with pytest.raises(ValueError, match="both lists of messages"):
        encode_lm_row({"prompt": "say a", "completion": CHAT[1:2]}, tokenizer)


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["plain", "with generation markers"])
def test_every_turn_of_the_assistant_is_in_the_loss(tokenizer: Any, template: str) -> None:
    tokenizer.chat_template = template
    assert [part for part in runs_of_text({"messages": CHAT}, tokenizer) if part[0]] == [
        (True, "aaa!"),
        (True, "ab!"),
    ]
    last_word = [*CHAT, {"role": "user", "content": "end"}]
    assert runs_of_text({"messages": last_word}, tokenizer)[-1][0] is False


def test_templates_that_rewrite_turns_must_mark_them(tokenizer: Any, tmp_path: Path) -> None:
    file = write(tmp_path / "chats.jsonl", {"messages": CHAT})
    tokenizer.chat_template = PLAIN.replace(*CUT_TURNS)
    with pytest.raises(ConfigError, match=r"chats.jsonl, line 1: .* message 1.*{% generation %}"):
        read_lm_rows("ptx.train_files", file, tokenizer, 64)
    tokenizer.chat_template = MARKED.replace(*CUT_TURNS)
    assert runs_of_text({"messages": CHAT}, tokenizer)[1] == (True, "a!")


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"question": "a", "answer": "b"}, "nor 'text'; columns: answer, question"),
        ({"prompt": "a"}, "'prompt' and 'response'.*columns: prompt"),
        ({"text": " "}, "'text' is empty"),
        ({"messages": CHAT[:1]}, "has no message of the assistant"),
        ({"messages": [{"role": "user"}]}, "not a list of messages with role and content"),
        (
            {"messages": [*CHAT[:1], {"role": "assistant", "content": " "}, *CHAT]},
            "message 1 of 'messages' is an empty assistant message",
        ),
        ([1], r"it is not an object with columns \(list\)"),
    ],
)
def test_bad_rows_name_their_line(tokenizer: Any, tmp_path: Path, row: Any, problem: str) -> None:
    file = write(tmp_path / "rows.jsonl", {"text": "good"}, row)
    with pytest.raises(ConfigError, match=f"rows.jsonl, line 2: .*{problem}"):
        read_lm_rows("ptx.train_files", file, tokenizer, 64)


def test_long_rows_are_truncated_or_dropped_and_counted(
    tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    long_prompt = {"prompt": "p" * 9, "response": "a"}
    file = write(tmp_path / "r.jsonl", {"text": "abc"}, {"text": "b" * 20}, long_prompt)
    with caplog.at_level(logging.INFO):
        rows = read_lm_rows("ptx.train_files", file, tokenizer, 6)
    assert [len(row.ids) for row in rows] == [4, 6]
    assert "3 rows; 2 truncated to 6 tokens; 1 dropped" in caplog.text
    with pytest.raises(ConfigError, match="No row is left to train or validate on"):
        read_lm_rows("ptx.train_files", write(tmp_path / "p.jsonl", long_prompt), tokenizer, 6)


def test_loss_on_all_puts_every_token_in_the_loss(tokenizer: Any, tmp_path: Path) -> None:
    file = write(tmp_path / "r.jsonl", {"prompt": "say a", "response": "aa"})
    response, row = (
        read_lm_rows("data.train_files", file, tokenizer, 64, loss_on_all=loss_on_all)[0]
        for loss_on_all in (False, True)
    )
    assert tokenizer.decode(response.ids[response.in_loss]) == "aa<eos>"
    assert row.ids.tolist() == response.ids.tolist()
    assert row.in_loss.all()


@pytest.fixture
def make_loader(tokenizer: Any, tmp_path: Path) -> Any:
    texts = [{"text": "abcdefg"[: 2 + number % 5]} for number in range(7)]
    rows = read_lm_rows("ptx.train_files", write(tmp_path / "t.jsonl", *texts), tokenizer, 64)
    return lambda seed=1: RowLoader(
        rows, seed, partial(lm_batch, pad_token_id=tokenizer.pad_token_id)
    )


def uids(loader: RowLoader[LMRow], *counts: int) -> list[str]:
    return [uid for count in counts for uid in loader.next_batch(count).non_tensor_batch["uid"]]


def test_padded_rows_predict_each_next_token(tokenizer: Any, make_loader: Any) -> None:
    batch = make_loader().next_batch(3).batch
    width = int(batch["attention_mask"].sum(1).max())
    assert batch["input_ids"].shape == (3, width)
    for row in range(3):
        length = int(batch["attention_mask"][row].sum())
        ids = batch["input_ids"][row].tolist()
        assert ids[length - 1] == tokenizer.eos_token_id
        assert set(ids[length:]) <= {tokenizer.pad_token_id}
        assert batch["responses"][row].tolist() == ids[1:]
        mask = [1] * (length - 1) + [0] * (width - length)
        assert batch["response_mask"][row].tolist() == mask
        assert batch["position_ids"][row, :length].tolist() == list(range(length))


def test_every_epoch_takes_every_row_once_in_another_order(make_loader: Any) -> None:
    taken = uids(make_loader(), 4, 4, 6)
    first, second = taken[:7], taken[7:]
    assert sorted(first) == [f"{row}-0" for row in range(7)]
    assert sorted(second) == [f"{row}-1" for row in range(7)]
    assert [uid[0] for uid in first] != [uid[0] for uid in second]
    assert uids(make_loader(), 14) == taken
    assert uids(make_loader(seed=2), 14) != taken


def test_a_resumed_loader_continues_where_it_stopped(make_loader: Any, tokenizer: Any) -> None:
    unbroken = uids(make_loader(), 15)
    stopped, resumed = make_loader(), make_loader()
    uids(stopped, 4)
    resumed.load_state_dict(stopped.state_dict())
    assert uids(resumed, 5, 6) == unbroken[4:]
    other = RowLoader(
        [encode_lm_row({"text": "a"}, tokenizer)], 1, partial(lm_batch, pad_token_id=0)
    )
    with pytest.raises(CheckpointError, match="num_rows: saved 7, now 1"):
        other.load_state_dict(stopped.state_dict())
