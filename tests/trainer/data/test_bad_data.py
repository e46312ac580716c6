"""Errors in data name the file and the row, and the row may be skipped."""

from __future__ import annotations

import gzip
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.trainer.data.test_prompts import make_config
from trainer.data.config import DataConfig
from trainer.data.files import rows_of_files
from trainer.data.lm_rows import encode_rows, read_lm_rows
from trainer.data.loader import RowLoader
from trainer.data.media import ReadColumns
from trainer.data.prompt_tokens import encode_prompt
from trainer.data.prompts import PromptLoader, PromptSet, load_tokenizer
from verl_like.errors import CheckpointError, ConfigError


def make_row(prompt: Any = "a", **columns: Any) -> dict[str, Any]:
    return {"prompt": prompt, "data_source": "s", "reward_model": {"ground_truth": "a"}, **columns}


def chat(content: Any, role: Any = "user") -> list[dict[str, Any]]:
    return [{"role": role, "content": content}]


def lines(*rows: Any) -> bytes:
    return b"\n".join(row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows)


def file(name: str, content: bytes) -> Callable[[Path], Path]:
    """Return a function that writes a file."""

    def write(folder: Path) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    return write


def second(bad: Any) -> Callable[[Path], Path]:
    """Return a function that writes JSON lines, of which only the second is bad."""
    return file("p.jsonl", lines(make_row(), bad, make_row()))


def nested(levels: int) -> dict[str, Any]:
    """Return an object in objects."""
    value: dict[str, Any] = {}
    for _ in range(levels - 1):
        value = {"a": value}
    return value


def text_that_is_none(folder: Path) -> Path:
    """Write a parquet file with a text that is not UTF-8."""
    path = folder / "p.parquet"
    texts = pa.Array.from_buffers(
        pa.string(), 3, [None, pa.py_buffer(bytes.fromhex("00000000010000000200000003000000")),
                         pa.py_buffer(b"a\xffb")]
    )  # fmt: skip
    pq.write_table(pa.table({"prompt": texts}), path)
    return path


def corrupt_page(folder: Path) -> Path:
    """Write a parquet file of three row groups, the second with zeros in its page."""
    path = folder / "p.parquet"
    table = pa.table({"prompt": [f"{name}" * 40 for name in "abcdef"]})
    pq.write_table(table, path, row_group_size=2, compression="snappy", use_dictionary=False)
    place = pq.ParquetFile(path).metadata.row_group(1).column(0)
    content = bytearray(path.read_bytes())
    start = place.data_page_offset
    content[start : start + place.total_compressed_size] = bytes(place.total_compressed_size)
    path.write_bytes(content)
    return path


def table_with_an_image(folder: Path) -> Path:
    """Write a parquet file of chats with parts, whose absent keys are None."""
    path, text = folder / "p.parquet", {"type": "text", "text": "a"}
    image = {"type": "image_url", "image_url": {"url": "a.png"}}
    table = {"prompt": [chat([text]), chat([image]), chat([text])]}
    pq.write_table(pa.table(table), path)
    return path


KINDS: dict[str, tuple[Callable[[Path], Path], str, int]] = {
    "no UTF-8": (second(b'{"prompt": "\xff"}'), "p.jsonl, line 2: not UTF-8.*need a JSON", 2),
    "half a line": (second(b'{"prompt": '), "line 2: not JSON .Expecting value at character 1", 2),
    "an open text": (second(b'{"prompt": "a'), "Invalid control character at character 14", 2),
    "a nest": (second(b"[" * 100_000), "line 2: not JSON .its JSON is nested too deeply", 2),
    "a deep object": (
        second(make_row(extra_info=nested(600))),
        "line 2: 'extra_info' has more than 300 levels of nesting",
        2,
    ),
    "null content": (second(make_row(chat(None))), "line 2: the content of message 0 is null", 2),
    "a role that is none": (
        second(make_row(chat("a", 3))),
        "line 2: message 0 has the invalid role 3",
        2,
    ),
    "a template that rejects it": (
        second(make_row(chat("a", "nobody"))),
        "line 2: the chat template",
        2,
    ),
    "a template's own error": (
        second(make_row([{**chat(None)[0], "tool_calls": [7]}])),
        "line 2: the chat template rejects it",
        2,
    ),
    "an image": (
        second(make_row(chat("look") + chat([{"type": "text", "text": "a"}, {"type": "image"}]))),
        "line 2: part 1 of message 1 is a place for an image, but the row has only 0 images",
        2,
    ),
    "an image in a table": (
        table_with_an_image,
        "p.parquet, row 1: the image .*a.png is not readable: No such file or directory",
        2,
    ),
    "a part that is no object": (
        second(make_row(chat(["a"]))),
        "line 2: part 0 of message 0 is 'a', not an object with a type",
        2,
    ),
    "a content that is an object": (
        second(make_row(chat({"text": "a"}))),
        "line 2: the content of message 0 is {'text': 'a'}, not a text",
        2,
    ),
    "a number": (second(make_row(7)), "line 2: 'prompt' is 7, neither a text nor messages", 2),
    "zero": (second(make_row(0)), "line 2: 'prompt' is 0, neither a text nor messages", 2),
    "four megabytes": (
        second(make_row("ab " * 1_400_000)),
        "line 2: it has 4,200,000 characters, more than the limit of 4,194,304",
        2,
    ),
    "a cut gzip file": (
        file("p.jsonl.gz", gzip.compress(lines(make_row(), make_row()) + b"\n", mtime=0)[:-6]),
        "p.jsonl.gz, line 3: not readable from here on",
        2,
    ),
    "a cell that is no UTF-8": (
        file("p.csv", b"prompt\na\n\xff\xfe\nb\n"),
        "p.csv, line 3: column 'prompt' is not UTF-8",
        2,
    ),
    "a cell without end": (
        file("p.csv", b"prompt\na\n" + b"x" * 200_000 + b"\nb\n"),
        "p.csv, line 3: not readable as CSV",
        2,
    ),
    "a parquet text that is no UTF-8": (text_that_is_none, "p.parquet, row 1: not readable", 2),
    "a corrupt page": (corrupt_page, "p.parquet, rows 2 to 3: these rows of the file", 4),
}
"""Kind -> a function that writes the file, the error, and the number of good rows."""

TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'nobody' %}"
    "{{ raise_exception('a stranger') }}{% endif %}{{ message.content + '!' }}{% endfor %}"
)


@pytest.mark.parametrize("kind", KINDS)
def test_a_bad_row_is_named_by_file_and_line_or_skipped(
    kind: str, tiny_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = load_tokenizer(str(tiny_dir / "model"))
    tokenizer.chat_template = TEMPLATE
    write, message, num_good = KINDS[kind]
    files = str(write(tmp_path))
    settings = {"train_files": files, "max_prompt_length": 1000}

    def read(on_bad_row: str) -> PromptSet:
        config = DataConfig(on_bad_row=on_bad_row, **settings)
        return PromptSet(config, "train_files", tokenizer, needs_rules=False)

    with pytest.raises(
        ConfigError, match=f"{message}.*Fix it, or leave such rows out with data.on_"
    ):
        read("error")
    with caplog.at_level(logging.WARNING):
        prompts = read("skip")
    assert (len(prompts), prompts.num_bad) == (num_good, 1)
    assert "are skipped (data.on_bad_row=skip)" in caplog.text


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_a_table_with_two_columns_of_one_name_is_rejected(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"p.{suffix}"
    if suffix == "csv":
        path.write_text("prompt,,prompt,\na,,b,\n", encoding="utf-8")
    else:
        pq.write_table(pa.table([["a"], ["b"]], names=["prompt", "prompt"]), path)
    with pytest.raises(ConfigError, match=rf"p.{suffix}: two columns .* 'prompt'"):
        list(rows_of_files([str(path)], "data.train_files"))


@pytest.mark.parametrize("kind", ["null content", "a corrupt page", "zero", "an image in a table"])
def test_recipes_on_rows_report_the_same_errors(kind: str, tiny_dir: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(tiny_dir / "model"))
    tokenizer.chat_template = TEMPLATE
    write, message, num_good = KINDS[kind]
    files = str(write(tmp_path))

    def encode(row: dict[str, Any], tokenizer: Any) -> Any:
        return encode_prompt(row["prompt"], tokenizer)

    def columns_of(row: dict[str, Any]) -> ReadColumns:
        return ReadColumns(["prompt"])

    arguments = "data.train_files", files, "prompts", columns_of, encode, tokenizer
    with pytest.raises(ConfigError, match=message):
        encode_rows(*arguments, "error")
    rows, num_bad = encode_rows(*arguments, "skip")
    assert (len(rows), num_bad) == (num_good, 1)


def test_surrogates_are_tokenized_as_replacement_characters(tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"prompt": "a\\ud800b"}')
    config = DataConfig(train_files=str(path), max_prompt_length=100)
    prompts = PromptSet(config, "train_files", tokenizer, needs_rules=False)
    (batch,) = prompts.in_order()
    assert batch.non_tensor_batch["raw_prompt"].tolist() == ["a\ud800b"]
    assert prompts._tokens(0).tolist() == tokenizer("a\ufffdb")["input_ids"]
    path.write_bytes(b'{"text": "a\\ud800b"}')
    (row,) = read_lm_rows("data.train_files", str(path), tokenizer, 100)
    assert row.ids.tolist()[:-1] == tokenizer("a\ufffdb")["input_ids"]
    assert encode_prompt(chat("\udfff"), tokenizer).size


@pytest.mark.parametrize("change", ["order", "ground truth"])
def test_changed_rows_are_rejected(change: str, tokenizer: Any, tmp_path: Path) -> None:
    rows = [make_row(letter, reward_model={"ground_truth": letter}) for letter in "abcd"]
    (tmp_path / "before.jsonl").write_bytes(lines(*rows))
    if change == "order":
        rows.reverse()
    else:
        rows[2]["reward_model"]["ground_truth"] = "x"
    (tmp_path / "after.jsonl").write_bytes(lines(*rows))
    before, same, after = (
        PromptLoader(make_config(tmp_path / f"{name}.jsonl", train_batch_size=2), tokenizer)
        for name in ("before", "before", "after")
    )
    same.load_state_dict(before.state_dict())
    with pytest.raises(
        CheckpointError, match="number of rows is the same .4., but .*verl-like exp"
    ):
        after.load_state_dict(before.state_dict())


def test_a_loader_of_rows_rejects_another_order(tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(lines({"text": "a"}, {"text": "b"}))
    rows = read_lm_rows("data.train_files", str(path), tokenizer, 10)
    before, same, after = (
        RowLoader(of, 1, lambda rows, uids: None) for of in (rows, list(rows), rows[::-1])
    )
    same.load_state_dict(before.state_dict())
    with pytest.raises(
        CheckpointError, match="number of rows is the same .2., but their contents or"
    ):
        after.load_state_dict(before.state_dict())
