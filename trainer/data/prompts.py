"""Turn prompts, which are rows in verl's schema, into batches of token ids.

Runs with equal data and settings use the prompts in the same order. A trainer takes one batch per
step from a `PromptLoader`; a validation uses a whole `PromptSet`:

    tokenizer = load_tokenizer(config.actor_rollout_ref.model.path)
    loader = PromptLoader(config, tokenizer)
    for step, batch in zip(range(loader.total_steps), loader): ...
    for batch in PromptSet(config.data, "val_files", tokenizer).in_order(): ...
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import numpy as np
import torch

from trainer.config.schema import TrainerConfig
from trainer.data.config import DataConfig
from trainer.data.files import IMAGE_REFS, listing, row_limit
from trainer.data.loader import check_same_rows, digest_of_rows, epoch_order, order_by_share
from trainer.data.model_config import small_files_of
from trainer.data.prompt_table import read_prompts
from verl_like.batch.protocol import DataProto
from verl_like.batch.ragged import RaggedTensor
from verl_like.errors import ConfigError
from workers.columns import ENVIRONMENT, IMAGES, PLAYERS
from workers.config import has_environment
from workers.models.folder import UNREADABLE, check_template

logger = logging.getLogger(__name__)


def load_tokenizer(path: str, key: str = "actor_rollout_ref.model.path") -> Any:
    """Load the tokenizer of a model folder; eos is the padding token if it has none."""
    from transformers import AutoTokenizer

    folder = small_files_of(key, path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, *UNREADABLE) as err:
        there = f"it holds {listing(folder)}" if folder.is_dir() else "there is no such folder"
        text = f"cannot load a tokenizer from {key}={path}: {there}."
        patterns = ("*token*", "*vocab*", "*.model")
        if folder.is_dir() and not any(file for name in patterns for file in folder.glob(name)):
            remedy = "Copy tokenizer.json and tokenizer_config.json from the base model."
            raise ConfigError(f"{text} {remedy}") from err
        raise ConfigError(f"{text}\n{err}") from err
    check_template(tokenizer)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


class PromptSet:
    """The tokenized prompts of `data.train_files` or `data.val_files`, by row number.

    - `num_bad`: number of rows that `data.on_bad_row=skip` left out
    - `num_overlong`: number of prompts that the length filter dropped
    - `num_truncated`: number of prompts that `data.truncation` cut
    """

    def __init__(
        self,
        config: DataConfig,
        setting: str,
        tokenizer: Any,
        needs_rules: bool = True,
        limit: int | None = None,
    ) -> None:
        """Read, tokenize and filter the files that the key `setting` of `config` names."""
        self._config, self._tokenizer = config, tokenizer
        self._table = read_prompts(config, setting, tokenizer, needs_rules, limit)
        self.num_bad, lengths = self._table.num_bad, self._table.lengths
        fits = lengths <= config.max_prompt_length
        self.rows = np.flatnonzero(fits | (not config.filter_overlong_prompts))
        self.num_overlong = len(lengths) - len(self.rows)
        self.num_truncated = len(self.rows) - int(fits.sum())
        self.columns = self._table.columns
        self.has_images = self._table.has_images
        """True if any row has images, or if its environment may add some."""
        self.players_of: Callable[[dict[str, Any]], list[str]] | None = None
        """Returns the players of a row's environment, if a run has several players."""
        longest = max(lengths, default=0)
        prompts = f"prompt{'' if len(lengths) == 1 else 's'}"
        self.story = f"data.{setting}: {len(lengths)} {prompts} of at most {longest} tokens"
        if self.num_overlong or self.num_truncated:
            self.story += (
                f"; {self.num_overlong} dropped and {self.num_truncated} truncated "
                f"(data.max_prompt_length={config.max_prompt_length})"
            )

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def data_sources(self) -> set[str]:
        """Names of the rows' data sources, which select the rule-based rewards."""
        return set(self._table.first_of_sources(self.rows))

    @cached_property
    def has_truth(self) -> bool:
        """True if any row has a ground truth; rows are read only up to the first that has one."""
        return self._any_truth("has a ground truth", lambda truth: truth is not None)

    @cached_property
    def has_open_asserts(self) -> bool:
        """True if any row has asserts whose expected value the tested program could find."""
        from workers.rewards.code import find_open_assert

        return self._any_truth(
            f"has asserts that need trust: {self._length_settings}",
            lambda truth: find_open_assert(truth) is not None,
        )

    def _any_truth(self, name: str, test: Callable[[Any], bool]) -> bool:
        def answer() -> str:
            rules = (self._table.row(number)["reward_model"] for number in self.rows.tolist())
            return "yes" if any(test(rule["ground_truth"]) for rule in rules) else "no"

        return self._table.remembered(name, answer) == "yes"

    @cached_property
    def digest(self) -> str:
        """Hash of the prompts in order, with data_source, reward_model and `columns` of each."""
        names = ("data_source", "reward_model", *self.columns)

        def compute() -> str:
            numbered = ((number, self._table.row(number)) for number in self.rows.tolist())
            return digest_of_rows(
                (self._tokens(number), {name: row.get(name) for name in names} | _hashes_of(row))
                for number, row in numbered
            )

        return self._table.remembered(f"digest of rows: {self._length_settings}", compute)

    @property
    def num_repeated(self) -> int:
        """Number of prompts whose tokens and images an earlier prompt has, too."""
        numbers = self.rows.tolist()
        images = (tuple(_hashes_of(self._table.row(number)).items()) for number in numbers)
        tokens = (self._tokens(number).tobytes() for number in numbers)
        return len(numbers) - len({*map(repr, zip(tokens, images, strict=True))})

    def tokens_of_first(self) -> np.ndarray[Any, Any]:
        """Return the tokens of the first prompt."""
        return self._tokens(int(self.rows[0]))

    def texts(self, column: str) -> list[str]:
        """Return a column of all prompts as texts."""
        return [str(self._table.row(number).get(column)) for number in self.rows.tolist()]

    @property
    def _length_settings(self) -> tuple[Any, ...]:
        """Settings that determine which rows remain, and their lengths."""
        config = self._config
        return config.max_prompt_length, config.truncation, config.filter_overlong_prompts

    def first_of_each_source(self) -> list[int]:
        """Return the row number of the first row of each data source."""
        return list(self._table.first_of_sources(self.rows).values())

    def _tokens(self, number: int) -> np.ndarray[Any, Any]:
        """Return the tokens of a prompt, cut to `data.max_prompt_length`."""
        tokens, limit = self._table.tokens(number), self._config.max_prompt_length
        if len(tokens) <= limit:
            return tokens
        return tokens[-limit:] if self._config.truncation == "left" else tokens[:limit]

    def in_order(self) -> Iterator[DataProto]:
        """Yield every prompt once, `data.train_batch_size` at a time."""
        size = self._config.train_batch_size
        for start in range(0, len(self), size):
            yield self.batch(self.rows[start : start + size].tolist(), epoch=0)

    def batch(self, chosen: list[int], epoch: int) -> DataProto:
        """Return the chosen rows, with their uids in this epoch."""
        tokens = [torch.tensor(self._tokens(row), dtype=torch.int64) for row in chosen]
        width, pad = self._config.max_prompt_length, self._tokenizer.pad_token_id
        input_ids = RaggedTensor.from_rows(tokens, width, at_end=True, fill=pad)
        positions = torch.cat([torch.arange(len(row)) for row in tokens])
        rows = [self._table.row(row) for row in chosen]
        others = [{name: row.get(name) for name in self.columns} for row in rows]

        return DataProto.from_dict(
            tensors={
                "input_ids": input_ids,
                "attention_mask": input_ids.with_values(torch.ones_like(positions)),
                "position_ids": input_ids.with_values(positions),
            },
            non_tensors={
                "uid": [f"{row}-{epoch}" for row in chosen],
                "raw_prompt": [row[self._config.prompt_key] for row in rows],
                "data_source": [row["data_source"] for row in rows],
                "reward_model": [row["reward_model"] for row in rows],
                "extra_info": [row.get("extra_info") or {} for row in rows],
                **({"row_columns": others} if self.columns else {}),
                **({IMAGES: list(map(_refs_of, rows))} if self.has_images else {}),
                **({PLAYERS: list(map(self.players_of, others))} if self.players_of else {}),
            },
            meta_info={
                "eos_token_id": self._tokenizer.eos_token_id,
                "pad_token_id": self._tokenizer.pad_token_id,
            },
        )


def _refs_of(row: dict[str, Any]) -> tuple[tuple[Any, ...], ...]:
    """Return the references to the images of a row, as plain values."""
    return tuple(tuple(ref) for ref in row.get(IMAGE_REFS, ()))


def _hashes_of(row: dict[str, Any]) -> dict[str, list[str]]:
    refs = _refs_of(row)
    return {IMAGE_REFS: [sha for _, sha, *_ in refs]} if refs else {}


class PromptLoader:
    """An endless, resumable source of prompt batches, epoch after epoch.

    `num_left_over` is the number of prompts that each epoch drops because they do not fill a batch,
    or exceed the share of their environment.
    """

    def __init__(
        self, config: Any, tokenizer: Any, needs_rules: bool = True, steps_per_batch: int = 1
    ) -> None:
        """Read, tokenize and filter `data.train_files` and, if there are any, `data.val_files`.

        Set `needs_rules` if rows are scored by the rule of their data_source. `steps_per_batch`
        steps train on the same samples.
        """
        self._steps_per_batch = steps_per_batch
        self._config: DataConfig = config.data
        self._trainer: TrainerConfig = config.trainer
        limit = row_limit(config)
        self.prompts = PromptSet(config.data, "train_files", tokenizer, needs_rules, limit)
        self._num_taken, seed = 0, self._trainer.seed
        self._num_batches: int = len(self.prompts) // self._config.train_batch_size
        shares = config.environment.shares if has_environment(config) else {}
        if shares:
            self._order = order_by_share(self.prompts.texts(ENVIRONMENT), shares, config.data, seed)
            self._num_batches = len(self._order(0)) // self._config.train_batch_size
        else:
            self._order = epoch_order(config.data, seed, len(self.prompts))
        self.num_left_over = len(self.prompts) - len(self) * self._config.train_batch_size
        self._sets = [self.prompts]
        self.validation: PromptSet | None = None
        """The prompts of `data.val_files`, if there are any."""
        if config.data.val_files:
            self.validation = PromptSet(config.data, "val_files", tokenizer, needs_rules, limit)
            self._sets.append(self.validation)
        if not len(self):
            number, size = len(self.prompts), self._config.train_batch_size
            other = f"lower this key to {number}"
            if number == 0:
                other = "correct the rows, or raise data.max_prompt_length"
            raise ConfigError(
                f"{self.prompts.story}. A batch of data.train_batch_size={size} needs more than "
                f"the remaining {number}. Add prompts, or {other}."
            )
        why = "shares in environment.by_name" if shares else "incomplete batch"
        skipped = f"; the last {self.num_left_over} of each epoch are skipped ({why})"
        logger.info("%s%s", self.prompts.story, skipped if self.num_left_over else "")
        if self.validation is not None:
            logger.info("%s", self.validation.story)

    def __len__(self) -> int:
        """Number of batches in an epoch."""
        return self._num_batches

    @property
    def total_steps(self) -> int:
        """Number of steps of the whole run.

        It follows from `data.total_prompts`, `trainer.total_training_steps`, or the number of
        epochs.
        """
        total = self._config.total_prompts
        if total is not None:
            return -(-total // self._config.train_batch_size) * self._steps_per_batch
        return self._trainer.num_steps(lambda epochs: epochs * len(self) * self._steps_per_batch)

    def __iter__(self) -> Iterator[DataProto]:
        """Yield the next batch and all after it, without end."""
        while True:
            self._num_taken += 1
            yield self.batch(self._num_taken - 1)

    def batch(self, number: int) -> DataProto:
        """Return a batch by its number, counted from the run's first batch, 0."""
        epoch, index = divmod(number, len(self))
        start = index * self._config.train_batch_size
        chosen = self._order(epoch)[start : start + self.num_prompts(number)]
        return self.prompts.batch(self.prompts.rows[chosen].tolist(), epoch)

    def num_prompts(self, number: int) -> int:
        """Return a batch's number of prompts; the last of `data.total_prompts` may have fewer."""
        size, total = self._config.train_batch_size, self._config.total_prompts
        left = size if total is None else total - number * size
        return min(left, size) if left > 0 else size

    @property
    def epoch(self) -> int:
        """The epoch of the batch that was taken last; the first epoch is 0."""
        return max(self._num_taken - 1, 0) // len(self)

    @property
    def data_sources(self) -> set[str]:
        """Data sources of training and validation rows."""
        return {name for prompts in self._sets for name in prompts.data_sources}

    @property
    def columns(self) -> list[str]:
        """Columns outside verl's schema that both training and validation rows have."""
        columns = self.prompts.columns
        return [name for name in columns if all(name in files.columns for files in self._sets)]

    @property
    def has_images(self) -> bool:
        """True if any row for training or validation has images."""
        return any(prompts.has_images for prompts in self._sets)

    @property
    def has_truth(self) -> bool:
        """True if training and, if there are any, validation rows have ground truths."""
        return all(prompts.has_truth for prompts in self._sets)

    @property
    def has_open_asserts(self) -> bool:
        """True if training or validation rows have asserts, as in `PromptSet.has_open_asserts`."""
        return any(prompts.has_open_asserts for prompts in self._sets)

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's position. A resume needs only this and the config's seed."""
        return {
            "num_taken": self._num_taken,
            "num_prompts": len(self.prompts),
            "batch_size": self._config.train_batch_size,
            "rows": self.prompts.digest,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to the position in `state`; raise an error if the data or batch size has changed."""
        check_same_rows(state, self.state_dict())
        self._num_taken = state["num_taken"]
