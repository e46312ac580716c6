"""A seed determines the batches of prompts; bad files are rejected with their contents."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.data.prompt_rows import read_rows
from trainer.data.config import DataConfig
from trainer.data.files import with_rule_columns
from trainer.data.model_config import read_model_config
from trainer.data.prompts import PromptLoader, PromptSet, load_tokenizer
from trainer.ppo.config import PPOConfig, PPOTrainerConfig
from verl_like.errors import CheckpointError, ConfigError
from workers.config import ActorRolloutRefConfig, ModelConfig, UserCodeConfig

WIDTH = 16


def make_config(files: Path, seed: int = 1, **data: Any) -> PPOConfig:
    settings = {"train_batch_size": 32, "max_prompt_length": WIDTH, **data}
    return PPOConfig(
        actor_rollout_ref=ActorRolloutRefConfig(model=ModelConfig(path="unused")),
        data=DataConfig(train_files=str(files), **settings),
        trainer=PPOTrainerConfig(seed=seed, total_epochs=2),
    )


@pytest.fixture
def make_loader(tiny_dir: Path, tokenizer: Any) -> Any:
    def make(files: Path = tiny_dir / "train.parquet", **settings: Any) -> PromptLoader:
        return PromptLoader(make_config(files, **settings), tokenizer)

    return make


def uids(loader: PromptLoader, num_batches: int) -> list[list[str]]:
    return [batch.non_tensor_batch["uid"].tolist() for batch in islice(loader, num_batches)]


def write_jsonl(path: Path, prompts: list[Any]) -> Path:
    rows = [
        {"prompt": p, "data_source": "s", "reward_model": {"ground_truth": "a"}} for p in prompts
    ]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


def test_a_model_path_around_a_model_or_of_a_file_is_explained(tiny_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"Set model\.path=.*/model\.$"):
        read_model_config("model.path", str(tiny_dir))
    with pytest.raises(ConfigError, match=r"\): it is a file\. "):
        read_model_config("model.path", str(tiny_dir / "train.parquet"))


def test_prompts_are_left_padded_and_know_special_tokens(make_loader: Any, tokenizer: Any) -> None:
    batch = next(iter(make_loader()))
    ids, mask, positions = (batch.batch[k] for k in ("input_ids", "attention_mask", "position_ids"))
    assert ids.shape == mask.shape == positions.shape == (32, WIDTH)
    assert ids.dtype == torch.int64
    special = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    assert batch.meta_info == special
    for row in range(len(batch)):
        message = batch.non_tensor_batch["raw_prompt"][row]
        text = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
        assert tokenizer.decode(ids[row][mask[row].bool()]) == text
        length = int(mask[row].sum())
        assert mask[row].tolist() == [0] * (WIDTH - length) + [1] * length
        assert positions[row].tolist() == [0] * (WIDTH - length) + list(range(length))
        assert set(ids[row][: WIDTH - length].tolist()) <= {tokenizer.pad_token_id}


def test_the_order_depends_only_on_seed_and_epoch(make_loader: Any) -> None:
    order, same, other = (uids(make_loader(seed=seed), 18) for seed in (1, 1, 2))
    assert order == same
    assert order != other
    first, second = order[:9], order[9:]
    assert {uid.split("-")[1] for batch in first for uid in batch} == {"0"}
    assert {uid.split("-")[1] for batch in second for uid in batch} == {"1"}
    assert [uid.split("-")[0] for uid in first[0]] != [uid.split("-")[0] for uid in second[0]]


def test_a_resumed_loader_continues_where_it_stopped(make_loader: Any) -> None:
    all_uids = uids(make_loader(), 19)  # the last one is the first of the third epoch
    stopped = make_loader()
    uids(stopped, 7)
    resumed = make_loader()
    resumed.load_state_dict(stopped.state_dict())
    assert uids(resumed, 12) == all_uids[7:]
    assert resumed.epoch == 18 / len(resumed) == 2


def test_a_loader_describes_its_training_and_validation_rows(
    make_loader: Any, tmp_path: Path
) -> None:
    row = {"prompt": "a", "data_source": "s", "reward_model": {"ground_truth": "a"}}
    train, val = tmp_path / "train.jsonl", tmp_path / "val.jsonl"
    train.write_text(json.dumps({**row, "level": 1, "topic": "sums"}), encoding="utf-8")
    val.write_text(json.dumps({**row, "data_source": "v", "level": 2}), encoding="utf-8")
    loader = make_loader(train, train_batch_size=1, val_files=str(val))
    assert loader.data_sources == {"s", "v"}
    assert loader.columns == ["level"], "validation rows have no topic"


def test_the_position_in_other_data_is_rejected(make_loader: Any) -> None:
    with pytest.raises(CheckpointError, match="batch_size: saved 32, now 16"):
        make_loader(train_batch_size=16).load_state_dict(make_loader().state_dict())


def test_the_partial_last_batch_is_dropped_and_counted(make_loader: Any) -> None:
    loader = make_loader()
    assert (len(loader), loader.num_left_over, loader.total_steps) == (9, 300 - 9 * 32, 18)


def test_a_total_of_prompts_ends_in_a_smaller_batch(make_loader: Any) -> None:
    loader = make_loader(train_batch_size=100, total_prompts=450)  # 3 batches an epoch
    assert loader.total_steps == 5
    sizes = [len(names) for names in uids(loader, 6)]
    assert sizes == [100, 100, 100, 100, 50, 100]  # nobody takes the batch after the end

    resumed = make_loader(train_batch_size=100, total_prompts=450)
    resumed.load_state_dict(resumed.state_dict() | {"num_taken": 4})
    assert uids(resumed, 1) == [uids(make_loader(train_batch_size=100), 5)[4][:50]]


def share_loader(tmp_path: Path, tokenizer: Any, counts: dict[str, int], **data: Any) -> Any:
    """A loader of rows of environments, of which `a` shall have a fifth of each step."""
    rows = [{"environment": name, **GOOD} for name, count in counts.items() for _ in range(count)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    config = make_config(tmp_path / "rows.jsonl", **{"train_batch_size": 10, **data})
    config.environment.paths = dict.fromkeys(("a", "b"), "guess.py:Guess")
    config.environment.by_name = {"a": {"share": 0.2}, "b": {"share": 0.8}}
    config.environment.check_by_name()
    return PromptLoader(config, tokenizer)


@pytest.mark.parametrize("shuffle", [True, False])
def test_each_environment_has_its_share_of_each_step(
    tmp_path: Path, tokenizer: Any, shuffle: bool
) -> None:
    """The file has 13 rows of `a` and 31 of `b`, of which an epoch needs eight per step."""
    loader = share_loader(tmp_path, tokenizer, {"a": 13, "b": 31}, shuffle=shuffle)
    assert (len(loader), loader.total_steps) == (3, 6)
    batches = uids(loader, 30)
    for names in batches:
        assert sum(int(uid.partition("-")[0]) < 13 for uid in names) == 2
    used = [uid for names in batches for uid in names]
    assert len({*used}) == len(used) == 300, "no prompt occurs twice in an epoch"
    assert {uid.partition("-")[0] for uid in used} == {*map(str, range(44))}, "all rows are used"
    assert uids(share_loader(tmp_path, tokenizer, {"a": 13, "b": 31}, shuffle=shuffle), 30) == (
        batches
    )


@pytest.mark.parametrize(
    ("counts", "data", "words"),
    [
        ({"a": 9, "b": 9, "bb": 1}, {}, "'bb', but environment.paths contains only a, b. Did you"),
        ({"a": 1, "b": 31}, {}, "needs 2 prompts of 'a'.* has 1"),
        ({"a": 9, "b": 9}, {"train_batch_size": 2}, "0.2 of data.train_batch_size=2 is less than"),
        ({"a": 9, "b": 9}, {"sampler": "my.order"}, "data.sampler=my.order also sets the order"),
    ],
)
def test_impossible_shares_are_rejected(
    tmp_path: Path, tokenizer: Any, counts: dict[str, int], data: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        share_loader(tmp_path, tokenizer, counts, **data)


def test_overlong_prompts_are_filtered_and_counted(make_loader: Any, tmp_path: Path) -> None:
    files = write_jsonl(tmp_path / "p.jsonl", ["a" * length for length in (3, 20, 4, 30)])
    loader = make_loader(files, filter_overlong_prompts=True, train_batch_size=2, shuffle=False)
    assert loader.prompts.num_overlong == 2
    assert uids(loader, 1) == [["0-0", "2-0"]]


@pytest.mark.parametrize(
    ("truncation", "part"), [("left", slice(-WIDTH, None)), ("right", slice(None, WIDTH))]
)
def test_overlong_prompts_are_cut_and_counted(
    make_loader: Any, tokenizer: Any, tmp_path: Path, truncation: str, part: slice
) -> None:
    text = "abcdefghijklmnopqrstuvwxyz"
    loader = make_loader(
        write_jsonl(tmp_path / "p.jsonl", [text]), truncation=truncation, train_batch_size=1
    )
    assert tokenizer.decode(next(iter(loader)).batch["input_ids"][0]) == text[part]
    assert loader.prompts.num_truncated == 1
    assert "0 dropped and 1 truncated (data.max_prompt_length=16)" in loader.prompts.story


GOOD = {"prompt": "a", "data_source": "s", "reward_model": {"ground_truth": "a"}}


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("prompt", [{"text": "a"}], "line 2: 'prompt' is not a list of mess"),
        (
            "data_source",
            None,
            "line 2: column 'data_source' is empty; non-empty columns: prompt, reward_model",
        ),
        ("reward_model", {"style": "rule"}, "line 2: reward_model has no 'ground_truth', only"),
        ("reward_model", "a", "line 2: reward_model is 'a', not an object with"),
    ],
)
def test_a_bad_row_is_named_by_its_line_or_skipped(
    column: str, value: Any, message: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join(map(json.dumps, [GOOD, {**GOOD, column: value}, GOOD])), "utf-8")
    with pytest.raises(ConfigError, match=message):
        read_rows(DataConfig(train_files=str(path)), "train_files")
    config = DataConfig(train_files=str(path), on_bad_row="skip")
    assert read_rows(config, "train_files") == ([GOOD, GOOD], 1)
    assert message[:7] in caplog.text


def test_rows_without_rules_need_only_prompts(tmp_path: Path) -> None:
    path = tmp_path / "prompts.csv"
    path.write_text('\ufeffact,prompt\nLinux,"say ""a"",\nor b"\nEmpty,\n', encoding="utf-8")
    config = DataConfig(train_files=str(path), on_bad_row="skip")
    rows, num_skipped = read_rows(config, "train_files", needs_rules=False)
    assert num_skipped == 1
    (row,) = rows
    assert (row["act"], row["prompt"]) == ("Linux", 'say "a",\nor b')
    assert (row["data_source"], row["reward_model"]) == ("prompts", {"ground_truth": None})

    with pytest.raises(ConfigError, match="no column 'data_source'. Columns: act, prompt"):
        read_rows(config, "train_files")
    path.write_text("prompt\na,b\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="line 2: it has more cells than the 1 columns"):
        read_rows(DataConfig(train_files=str(path)), "train_files", needs_rules=False)


def test_a_file_without_the_column_of_prompts_is_told_its_own_columns(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"question": "a", "answer": "b"}\n', "utf-8")
    words = "line 1: no column 'prompt'; non-empty columns: answer, question. The prompts' column "
    with pytest.raises(ConfigError, match=words + "is set by data.prompt_key.$"):
        read_rows(DataConfig(train_files=str(path)), "train_files", needs_rules=False)


def test_rows_of_another_schema_are_told_what_to_change(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    for row, words in (
        ({"prompt": [{"from": "user", "value": "a"}]}, "Rename 'from' to 'role', and 'value' to"),
        (
            {"prompt": "a", "data_source": "openai/gsm8k"},
            "Add it .{'ground_truth': '42'}. to score",
        ),
    ):
        path.write_text(json.dumps(row), "utf-8")
        needs_rules = "data_source" in row
        with pytest.raises(ConfigError, match=words):
            read_rows(DataConfig(train_files=str(path)), "train_files", needs_rules=needs_rules)


def test_a_row_keeps_its_rule() -> None:
    assert with_rule_columns(GOOD) == GOOD
    row = with_rule_columns({"reward_model": {"style": "own"}, "data_source": "s"})
    assert row == {"reward_model": {"style": "own", "ground_truth": None}, "data_source": "s"}


def test_a_bad_parquet_file_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "p.parquet"
    path.write_text("no parquet", encoding="utf-8")
    with pytest.raises(ConfigError, match="not a readable parquet file"):
        read_rows(DataConfig(train_files=str(path)), "train_files")


CUSTOM = """
def letters(data_files, tokenizer, config):
    for letter in "abc":
        rule = {"ground_truth": letter}
        prompt = letter * config.max_prompt_length
        yield {"prompt": prompt, "data_source": "s", "reward_model": rule}

class Letters:
    def __init__(self, data_files, tokenizer, config):
        self.rows = list(letters(data_files, tokenizer, config))
    def __len__(self):
        return len(self.rows)
    def __getitem__(self, index):
        if index >= len(self):
            raise RuntimeError("asked for a row that is not there")
        return self.rows[index]
"""


@pytest.mark.parametrize("name", ["letters", "Letters"])
def test_rows_may_come_from_a_user_s_data_set(tokenizer: Any, tmp_path: Path, name: str) -> None:
    (tmp_path / "own.py").write_text(CUSTOM, encoding="utf-8")
    config = DataConfig(
        custom_cls=UserCodeConfig(path=str(tmp_path / "own.py"), name=name), max_prompt_length=3
    )
    (batch,) = PromptSet(config, "train_files", tokenizer).in_order()
    assert [tokenizer.decode(ids) for ids in batch.batch["input_ids"]] == ["aaa", "bbb", "ccc"]


def test_the_pad_token_defaults_to_eos(tiny_dir: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(tiny_dir / "model"))
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    assert loaded.pad_token_id == loaded.eos_token_id


@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet"])
def test_an_empty_file_is_an_error(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"rows.{ending}"
    path.touch()
    with pytest.raises(ConfigError, match=rf"data\.train_files: .*{ending} is empty"):
        read_rows(DataConfig(train_files=str(path)), "train_files", needs_rules=False)


def test_the_column_answer_is_the_default_ground_truth() -> None:
    def truth(**columns: Any) -> Any:
        return with_rule_columns({"prompt": "a", **columns})["reward_model"]["ground_truth"]

    assert truth(answer="4") == "4"
    assert truth(answer="4", ground_truth="5") == "5"
    assert truth(answer="4", reward_model={"ground_truth": None}) is None
