"""Lists of parts read as texts, in the chats of prompts and of recipes on rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.trainer.data.test_prompts import make_config
from trainer.data.lm_rows import encode_lm_row, read_lm_rows
from trainer.data.pairs import encode_pair, read_labeled
from trainer.data.prompt_tokens import encode_prompt
from trainer.data.prompts import PromptSet

MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def chat(system: Any, user: Any) -> list[dict[str, Any]]:
    return [{"role": "system", "content": system}, {"role": "user", "content": user}]


def reply(content: Any) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": content}]


def write(path: Path, **columns: list[Any]) -> str:
    pq.write_table(pa.table(columns), path)
    return str(path)


def test_a_parquet_file_of_parts_has_the_prompts_of_its_texts(
    tokenizer: Any, tmp_path: Path
) -> None:
    """Arrow gives every part and message all keys, with None for those that are absent."""
    with_keys = [{**part, "image": None} for part in parts("say", " a")]
    prompts = [chat(parts("be"), with_keys), [{**chat(parts("s"), parts("b"))[1], "name": None}]]
    kind = pa.list_(
        pa.struct(
            {
                "role": pa.string(),
                "name": pa.string(),
                "content": pa.list_(
                    pa.struct({"type": pa.string(), "text": pa.string(), "image": pa.binary()})
                ),
            }
        )
    )
    path = tmp_path / "parts.parquet"
    pq.write_table(pa.table({"prompt": pa.array(prompts, kind)}), path)
    config = make_config(path, train_batch_size=2).data
    (batch,) = PromptSet(config, "train_files", tokenizer, needs_rules=False).in_order()
    texts = [chat("be", "say a"), [{"role": "user", "content": "b"}]]
    mask, ids = batch.padded("attention_mask").bool(), batch.padded("input_ids")
    for row, messages in enumerate(texts):
        expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        assert ids[row][mask[row]].tolist() == expected


@pytest.mark.parametrize("template", [None, MARKED])
def test_sft_trains_on_the_texts_of_parts(
    tokenizer: Any, tmp_path: Path, template: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", template or tokenizer.chat_template)
    in_parts = chat(parts("be"), parts("say ", "a")) + reply(parts("a", "a"))
    file = write(tmp_path / "rows.parquet", messages=[in_parts])
    (row,) = read_lm_rows("data.train_files", file, tokenizer, 64)
    texts = encode_lm_row({"messages": chat("be", "say a") + reply("aa")}, tokenizer)
    assert np.array_equal(row.ids, texts.ids)
    assert np.array_equal(row.in_loss, texts.in_loss)


def test_pairs_and_labeled_rows_read_parts(tokenizer: Any, tmp_path: Path) -> None:
    prompt, text_prompt = chat(parts("be"), parts("say ", "a")), chat("be", "say a")
    pair = encode_pair(
        {"prompt": prompt, "chosen": reply(parts("a", "a")), "rejected": reply(parts("b"))},
        tokenizer,
    )
    texts = encode_pair(
        {"prompt": text_prompt, "chosen": reply("aa"), "rejected": reply("b")}, tokenizer
    )
    for side, expected in ((pair.chosen, texts.chosen), (pair.rejected, texts.rejected)):
        assert np.array_equal(side.ids, expected.ids)
        assert np.array_equal(side.in_loss, expected.in_loss)
    file = write(
        tmp_path / "kto.parquet",
        prompt=[prompt, prompt],
        completion=[reply(parts("a", "a")), reply(parts("b"))],
        label=[True, False],
    )
    good, _ = read_labeled("data.train_files", file, tokenizer, 64, seed=1)
    assert np.array_equal(good.response.ids, texts.chosen.ids)


def test_an_empty_assistant_message_of_parts_is_rejected(tokenizer: Any) -> None:
    messages = chat("be", "say a") + reply(parts("", " "))
    with pytest.raises(ValueError, match="message 2 of 'messages' is an empty assistant message"):
        encode_lm_row({"messages": messages}, tokenizer)


def test_a_part_that_is_not_a_text_is_named_in_every_column(tokenizer: Any) -> None:
    image = [*parts("a"), {"type": "image", "image": "a.png"}]
    problem = "part 1 of message 0 has the type 'image'; only text is read"
    with pytest.raises(ValueError, match=problem):
        encode_prompt([{"role": "user", "content": image}], tokenizer)
    with pytest.raises(ValueError, match=f"'rejected': {problem}"):
        encode_pair({"chosen": reply("a"), "rejected": reply(image)}, tokenizer)
