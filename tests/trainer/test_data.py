"""Prompts become the same batches for the same seed, and every bad file is refused with what is there."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer.config import DataConfig, PPOConfig, TrainerConfig
from trainer.data import PromptLoader, encode_prompts, load_tokenizer, read_rows
from verl_like.errors import CheckpointError, ConfigError
from workers.config import ActorRolloutRefConfig, ModelConfig

WIDTH = 16


@pytest.fixture(scope="module")
def tokenizer(tiny_dir: Path) -> Any:
    return load_tokenizer(str(tiny_dir / "model"))


def make_config(files: Path, seed: int = 1, **data: Any) -> PPOConfig:
    settings = {"train_batch_size": 32, "max_prompt_length": WIDTH, **data}
    return PPOConfig(
        actor_rollout_ref=ActorRolloutRefConfig(model=ModelConfig(path="unused")),
        data=DataConfig(train_files=str(files), **settings),
        trainer=TrainerConfig(seed=seed, total_epochs=2),
    )


@pytest.fixture
def make_loader(tiny_dir: Path, tokenizer: Any) -> Any:
    def make(files: Path = tiny_dir / "train.parquet", **settings: Any) -> PromptLoader:
        return PromptLoader(make_config(files, **settings), tokenizer)

    return make


def uids(loader: PromptLoader, num_batches: int) -> list[list[str]]:
    return [batch.non_tensor_batch["uid"].tolist() for batch in islice(loader, num_batches)]


def write_jsonl(path: Path, prompts: list[Any]) -> Path:
    rows = [{"prompt": p, "data_source": "s", "reward_model": {"ground_truth": "a"}} for p in prompts]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


def test_prompts_are_left_padded_to_the_width(make_loader: Any, tokenizer: Any) -> None:
    batch = next(iter(make_loader()))
    ids, mask, positions = (batch.batch[k] for k in ("input_ids", "attention_mask", "position_ids"))
    assert ids.shape == mask.shape == positions.shape == (32, WIDTH)
    for row in range(len(batch)):
        message = batch.non_tensor_batch["raw_prompt"][row]
        text = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
        assert tokenizer.decode(ids[row][mask[row].bool()]) == text
        length = int(mask[row].sum())
        assert mask[row].tolist() == [0] * (WIDTH - length) + [1] * length
        assert positions[row].tolist() == [0] * (WIDTH - length) + list(range(length))
        assert set(ids[row][: WIDTH - length].tolist()) <= {tokenizer.pad_token_id}


def test_the_order_depends_on_the_seed_and_the_epoch_alone(make_loader: Any) -> None:
    one, again, other = (uids(make_loader(seed=seed), 18) for seed in (1, 1, 2))
    assert one == again
    assert one != other
    first, second = one[:9], one[9:]
    assert {uid.split("-")[1] for batch in first for uid in batch} == {"0"}
    assert {uid.split("-")[1] for batch in second for uid in batch} == {"1"}
    assert [uid.split("-")[0] for uid in first[0]] != [uid.split("-")[0] for uid in second[0]]


def test_without_shuffling_rows_come_in_their_order(make_loader: Any) -> None:
    assert uids(make_loader(shuffle=False), 1)[0] == [f"{row}-0" for row in range(32)]


def test_a_resumed_loader_goes_on_where_it_stopped(make_loader: Any) -> None:
    whole = uids(make_loader(), 20)
    stopped = make_loader()
    uids(stopped, 7)
    resumed = make_loader()
    resumed.load_state_dict(stopped.state_dict())
    assert uids(resumed, 13) == whole[7:]


def test_the_position_in_other_data_is_refused(make_loader: Any) -> None:
    with pytest.raises(CheckpointError, match="batch_size: saved 32, now 16"):
        make_loader(train_batch_size=16).load_state_dict(make_loader().state_dict())


def test_the_partial_last_batch_is_dropped_and_counted(make_loader: Any) -> None:
    loader = make_loader()
    assert (len(loader), loader.num_left_over, loader.total_steps) == (9, 300 - 9 * 32, 18)


def test_overlong_prompts_are_filtered_and_counted(make_loader: Any, tmp_path: Path) -> None:
    files = write_jsonl(tmp_path / "p.jsonl", ["a" * length for length in (3, 20, 4, 30)])
    loader = make_loader(files, filter_overlong_prompts=True, train_batch_size=2, shuffle=False)
    assert loader.num_overlong == 2
    assert uids(loader, 1) == [["0-0", "2-0"]]


@pytest.mark.parametrize(("truncation", "kept"), [("left", slice(-WIDTH, None)), ("right", slice(None, WIDTH))])
def test_overlong_prompts_are_cut(make_loader: Any, tmp_path: Path, truncation: str, kept: slice) -> None:
    text = "abcdefghijklmnopqrstuvwxyz"
    loader = make_loader(write_jsonl(tmp_path / "p.jsonl", [text]), truncation=truncation, train_batch_size=1)
    assert loader._tokenizer.decode(next(iter(loader)).batch["input_ids"][0]) == text[kept]


def test_an_overlong_prompt_is_refused_by_default(make_loader: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Prompt 1 has 20 tokens, data.max_prompt_length=16"):
        make_loader(write_jsonl(tmp_path / "p.jsonl", ["a", "a" * 20]), train_batch_size=1)


def test_nothing_left_after_filtering_is_refused_with_the_numbers(make_loader: Any, tmp_path: Path) -> None:
    files = write_jsonl(tmp_path / "p.jsonl", ["a" * 20, "a" * 30])
    with pytest.raises(ConfigError, match=r"holds 2 prompts; 2 were dropped .* \(the longest has 30\): 0 remain"):
        make_loader(files, filter_overlong_prompts=True)


def test_parquet_and_jsonl_give_the_same_rows(tiny_dir: Path, tmp_path: Path) -> None:
    rows = read_rows(str(tiny_dir / "train.parquet"), ["prompt"])
    path = tmp_path / "train.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    assert read_rows([str(path)], ["prompt"]) == rows


def test_a_missing_file_is_refused_with_what_is_there(tiny_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"no file .*tain.parquet; .* holds model, train.parquet"):
        read_rows(str(tiny_dir / "tain.parquet"), [])


def test_a_missing_column_is_refused_with_those_there(tiny_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"row 0: no column 'promt'.*data_source.*Did you mean 'prompt'"):
        read_rows(str(tiny_dir / "train.parquet"), ["promt"])


@pytest.mark.parametrize(("line", "answer"), [("{", "line 2 is not JSON"), ("3", "line 2 is a JSON int")])
def test_a_bad_line_is_refused_with_its_number(tmp_path: Path, line: str, answer: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n' + line, encoding="utf-8")
    with pytest.raises(ConfigError, match=answer):
        read_rows(str(path), ["prompt"])


def test_a_bad_parquet_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.parquet"
    path.write_text("no parquet", encoding="utf-8")
    with pytest.raises(ConfigError, match="not a readable parquet file"):
        read_rows(str(path), [])


def test_a_folder_without_tokenizer_is_refused_with_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ConfigError, match=r"it holds notes.txt"):
        load_tokenizer(str(tmp_path))


def test_a_missing_model_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such folder"):
        load_tokenizer(str(tmp_path / "nowhere"))


def test_chat_messages_without_a_chat_template_are_refused(tiny_dir: Path) -> None:
    tokenizer = load_tokenizer(str(tiny_dir / "model"))
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="1 of 2 prompts are chat messages"):
        encode_prompts(["a", [{"role": "user", "content": "a"}]], tokenizer)


def test_pad_falls_back_to_eos(tiny_dir: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(tiny_dir / "model"))
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    assert loaded.pad_token_id == loaded.eos_token_id


def test_the_batch_carries_the_token_ids_that_engines_need(make_loader: Any, tokenizer: Any) -> None:
    batch = next(iter(make_loader()))
    assert batch.meta_info == {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    assert batch.batch["input_ids"].dtype == torch.int64
