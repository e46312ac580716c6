"""Prompts: files in verl's schema -> batches of token ids, in an order that depends on the seed alone.

`trainer.ppo` builds one `PromptLoader` and takes a batch per step:

    tokenizer = load_tokenizer(config.actor_rollout_ref.model.path)
    loader = PromptLoader(config, tokenizer)
    for step, batch in zip(range(loader.total_steps), loader): ...
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainer.config import DataConfig, PPOConfig
from verl_like.errors import CheckpointError, ConfigError, nearest
from verl_like.protocol import DataProto

logger = logging.getLogger(__name__)


def load_tokenizer(path: str) -> Any:
    """The tokenizer of a model folder; without a pad token, eos pads."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as err:
        there = f"it holds {_listing(Path(path))}" if Path(path).is_dir() else "there is no such folder"
        raise ConfigError(f"No tokenizer loads from actor_rollout_ref.model.path={path}: {there}.\n{err}") from err
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def read_rows(files: str | Sequence[str], columns: Sequence[str]) -> list[dict[str, Any]]:
    """The rows of parquet or JSONL files, in order; each must have `columns`."""
    rows: list[dict[str, Any]] = []
    for name in [files] if isinstance(files, str) else files:
        path = Path(name)
        if not path.is_file():
            raise ConfigError(
                f"data.train_files: there is no file {path}; {path.parent} holds {_listing(path.parent)}."
            )
        new = _read_file(path)
        for index, row in enumerate(new):
            for column in columns:
                if row.get(column) is None:
                    raise ConfigError(
                        f"{path}, row {index}: no column {column!r}; there is {', '.join(sorted(row))}."
                        f"{nearest(column, row)} The prompts' column is set by data.prompt_key."
                    )
        rows += new
    return rows


def _read_file(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            return list(pq.read_table(path).to_pylist())
        except pa.ArrowInvalid as err:
            raise ConfigError(f"{path} is not a readable parquet file: {err}") from err
    rows = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as err:
                raise ConfigError(
                    f"{path}, line {number} is not JSON ({err}); give .parquet, or a JSON object a line."
                ) from err
            if not isinstance(row, dict):
                raise ConfigError(f"{path}, line {number} is a JSON {type(row).__name__}, not an object.")
            rows.append(row)
    return rows


def _listing(folder: Path) -> str:
    if not folder.is_dir():
        return "nothing: the folder is not there"
    names = sorted(entry.name for entry in folder.iterdir())
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "") or "nothing"


class PromptLoader:
    """Endless batches of prompts, epoch after epoch; a resumed one goes on where the saved one stopped.

    `num_overlong` counts the prompts that the filter dropped, `num_left_over` those of each epoch's partial last batch.
    """

    def __init__(self, config: PPOConfig, tokenizer: Any):
        """Read, tokenize and filter the files of `config.data`."""
        self._config: DataConfig = config.data
        self._trainer = config.trainer
        self._tokenizer = tokenizer
        rows = read_rows(self._config.train_files, (self._config.prompt_key, "data_source", "reward_model"))
        prompts = encode_prompts([row[self._config.prompt_key] for row in rows], tokenizer)
        fits = [len(ids) <= self._config.max_prompt_length for ids in prompts]
        kept = [i for i in range(len(rows)) if fits[i] or not self._config.filter_overlong_prompts]
        self.num_overlong = len(rows) - len(kept)
        self._rows = {i: rows[i] for i in kept}
        self._ids = {i: prompts[i] if fits[i] else self._cut(prompts[i], i) for i in kept}
        self._order = np.array(kept)
        self.num_left_over = len(kept) % self._config.train_batch_size
        self._num_taken = 0
        self._refuse_too_few(len(rows), max(map(len, prompts), default=0))
        logger.info(
            "%d prompts, %d dropped as overlong, %d left over", len(kept), self.num_overlong, self.num_left_over
        )

    def _refuse_too_few(self, num_rows: int, longest: int) -> None:
        size = self._config.train_batch_size
        if len(self._order) >= size:
            return
        raise ConfigError(
            f"data.train_files holds {num_rows} prompts; {self.num_overlong} were dropped for more than "
            f"data.max_prompt_length={self._config.max_prompt_length} tokens (the longest has {longest}): "
            f"{len(self._order)} remain, too few for one batch of data.train_batch_size={size}."
        )

    def _cut(self, ids: np.ndarray[Any, Any], row: int) -> np.ndarray[Any, Any]:
        limit = self._config.max_prompt_length
        if self._config.truncation == "error":
            raise ConfigError(
                f"Prompt {row} has {len(ids)} tokens, data.max_prompt_length={limit}. Raise it, or set "
                "data.filter_overlong_prompts=true, or data.truncation=left|right."
            )
        return ids[-limit:] if self._config.truncation == "left" else ids[:limit]

    def __len__(self) -> int:
        """Batches in an epoch."""
        return len(self._order) // self._config.train_batch_size

    @property
    def total_steps(self) -> int:
        """Steps of the whole run: `trainer.total_training_steps`, or epochs x batches."""
        return self._trainer.total_training_steps or self._trainer.total_epochs * len(self)

    def __iter__(self) -> Iterator[DataProto]:
        """The next batch and all after it, without end."""
        while True:
            epoch, index = divmod(self._num_taken, len(self))
            order = self._order
            if self._config.shuffle:
                order = np.random.default_rng([self._trainer.seed, epoch]).permutation(order)
            size = self._config.train_batch_size
            self._num_taken += 1
            yield self._batch(order[index * size : (index + 1) * size].tolist(), epoch)

    def _batch(self, chosen: list[int], epoch: int) -> DataProto:
        width = self._config.max_prompt_length
        input_ids = torch.full((len(chosen), width), self._tokenizer.pad_token_id, dtype=torch.int64)
        attention_mask = torch.zeros_like(input_ids)
        for slot, row in enumerate(chosen):
            ids = self._ids[row]
            input_ids[slot, width - len(ids) :] = torch.from_numpy(ids)
            attention_mask[slot, width - len(ids) :] = 1
        position_ids = (attention_mask.cumsum(-1) - 1).clamp(min=0)
        rows = [self._rows[row] for row in chosen]
        return DataProto.from_dict(
            tensors={"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids},
            non_tensors={
                "uid": as_objects([f"{row}-{epoch}" for row in chosen]),
                "raw_prompt": as_objects([row[self._config.prompt_key] for row in rows]),
                "data_source": as_objects([row["data_source"] for row in rows]),
                "reward_model": as_objects([row["reward_model"] for row in rows]),
                "extra_info": as_objects([row.get("extra_info") or {} for row in rows]),
            },
            meta_info={"eos_token_id": self._tokenizer.eos_token_id, "pad_token_id": self._tokenizer.pad_token_id},
        )

    def state_dict(self) -> dict[str, int]:
        """Where the loader stands; with the seed in the config, all that a resume needs."""
        return {
            "num_taken": self._num_taken,
            "num_prompts": len(self._order),
            "batch_size": self._config.train_batch_size,
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go to where `state` was taken; other data or another batch size is refused."""
        now = self.state_dict()
        differs = [f"{k}: saved {state[k]}, now {now[k]}" for k in ("num_prompts", "batch_size") if state[k] != now[k]]
        if differs:
            raise CheckpointError(f"The loader's saved position is one in other data ({'; '.join(differs)}).")
        self._num_taken = state["num_taken"]


def encode_prompts(prompts: Sequence[Any], tokenizer: Any) -> list[np.ndarray[Any, Any]]:
    """Token ids of each prompt: chat messages through the chat template, strings as they are."""
    chats = [p for p in prompts if not isinstance(p, str)]
    if chats and tokenizer.chat_template is None:
        raise ConfigError(
            f"The tokenizer of {tokenizer.name_or_path} has no chat template, and {len(chats)} of {len(prompts)} "
            "prompts are chat messages. Add chat_template.jinja to the model folder, or give prompts as plain strings."
        )
    texts = [
        p if isinstance(p, str) else tokenizer.apply_chat_template(p, add_generation_prompt=True, tokenize=False)
        for p in prompts
    ]
    plain = [isinstance(p, str) for p in prompts]
    encoded = []
    for index, (text, special) in enumerate(zip(texts, plain, strict=True)):
        ids = np.array(tokenizer(text, add_special_tokens=special)["input_ids"], dtype=np.int64)
        if ids.size == 0:
            raise ConfigError(f"Prompt {index} has no tokens: {text!r}.")
        encoded.append(ids)
    return encoded


def as_objects(values: Sequence[Any]) -> np.ndarray[Any, Any]:
    """A one-dimensional object column, whatever the values are (numpy would make a table of equal-length lists)."""
    column = np.empty(len(values), dtype=object)
    for index, value in enumerate(values):
        column[index] = value
    return column
