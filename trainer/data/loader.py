"""The order of rows, a digest of rows, and a loader that repeats rows without end.

An epoch uses the prompts in file order, shuffled, or in the order of a user's function:

    def hardest_first(num_prompts: int, epoch: int, seed: int) -> Sequence[int]: ...

Set `data.sampler=my_module.hardest_first` to use it. It returns as many positions as there are
prompts; a position may occur twice or not at all. A resumed run calls it again, so the positions
may depend only on these arguments.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from trainer.data.config import DataConfig
from verl_like.batch.protocol import DataProto
from verl_like.errors import CheckpointError, ConfigError, nearest
from verl_like.files import json_line
from verl_like.registry import CallSignature, check_call, load_object

Positions = np.ndarray[Any, Any]


def epoch_order(config: DataConfig, seed: int, num_prompts: int) -> Callable[[int], Positions]:
    """Return a function that maps an epoch to its prompts' positions; it caches the last epoch."""
    name = f"data.sampler={config.sampler}"
    sampler: Any = None
    if config.sampler is not None:
        sampler = load_object(config.sampler, "data.sampler")
        check_call(sampler, name, CallSignature(by_name=("num_prompts", "epoch", "seed")))

    @lru_cache(maxsize=1)
    def order(epoch: int) -> Positions:
        if sampler is None:
            return shuffled(num_prompts, seed, epoch) if config.shuffle else np.arange(num_prompts)
        positions = np.asarray(sampler(num_prompts=num_prompts, epoch=epoch, seed=seed))
        is_whole = positions.shape == (num_prompts,) and np.issubdtype(positions.dtype, np.integer)
        if not is_whole or positions.min() < 0 or positions.max() >= num_prompts:
            raise ConfigError(
                f"{name} returned {positions.dtype} of shape {list(positions.shape)}; it must "
                f"return {num_prompts} integers from 0 to {num_prompts - 1}."
            )
        return positions

    return order


def order_by_share(
    names: Sequence[str], shares: Mapping[str, float], config: DataConfig, seed: int
) -> Callable[[int], Positions]:
    """Return a function like `epoch_order`; every batch has these shares of the prompts' names.

    An epoch ends before a name needs one of its prompts for the second time.
    """
    if config.sampler is not None:
        raise ConfigError(
            f"data.sampler={config.sampler} also sets the order of the prompts. Leave it out, or "
            "the shares in environment.by_name."
        )
    unknown = sorted({*names} - {*shares})
    if unknown:
        raise ConfigError(
            f"data.train_files: a row's environment is {unknown[0]!r}, but environment.paths "
            f"contains only {', '.join(shares)}.{nearest(unknown[0], shares)}"
        )
    size = config.train_batch_size
    counts = {name: int(share * size) for name, share in shares.items()}
    by_rest = sorted(shares, key=lambda name: counts[name] - shares[name] * size)
    for name in by_rest[: size - sum(counts.values())]:
        counts[name] += 1
    rows = {name: np.flatnonzero(np.array(names) == name) for name in shares}
    for name, count in counts.items():
        if count == 0:
            raise ConfigError(
                f"environment.by_name: {name}'s share={shares[name]:g} of data.train_batch_size="
                f"{size} is less than a prompt. Raise one of them."
            )
        if len(rows[name]) < count:
            raise ConfigError(
                f"environment.by_name: a step needs {count} prompts of {name!r} (share="
                f"{shares[name]:g} of data.train_batch_size={size}), but data.train_files has "
                f"{len(rows[name])}. Add prompts, or lower one of these keys."
            )
    num_batches = min(len(rows[name]) // count for name, count in counts.items())

    @lru_cache(maxsize=1)
    def order(epoch: int) -> Positions:
        rng, columns = np.random.default_rng([seed, epoch]), []
        for name, count in counts.items():
            num_used = num_batches * count
            others_first = np.roll(rows[name], -epoch * num_used)
            places = rng.permutation(rows[name]) if config.shuffle else others_first
            columns.append(places[:num_used].reshape(num_batches, count))
        return rng.permuted(np.concatenate(columns, axis=1), axis=1).reshape(-1)

    return order


def shuffled(num_rows: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return the positions of the rows in the order of an epoch."""
    return np.random.default_rng([seed, epoch]).permutation(num_rows)


OTHER_ROWS = (
    "Restore the data and data.train_batch_size, or start a new run in another "
    "trainer.default_local_dir from the weights that `verl-like export` writes."
)
"""Advice if rows or batch size differ from those that the run has used so far."""


def check_same_rows(saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise an error if the saved position belongs to other rows, or to another batch size."""
    sizes = {name: size for name, size in now.items() if name not in ("num_taken", "rows")}
    differs = [
        f"{name}: saved {saved[name]}, now {size}"
        for name, size in sizes.items()
        if saved[name] != size
    ]
    if not differs and saved["rows"] != now["rows"]:
        number = next(iter(sizes.values()))
        differs.append(
            f"the number of rows is the same ({number}), but their contents or order differ"
        )
    if differs:
        raise CheckpointError(
            f"the checkpoint belongs to different data ({'; '.join(differs)}). {OTHER_ROWS}"
        )


def digest_of_rows(rows: Iterable[Any]) -> str:
    """Hash the tokens, texts and numbers in rows; of other values, only hash the type."""
    digest = hashlib.blake2b(digest_size=16)
    for row in rows:
        _add(row, digest)
    return digest.hexdigest()


def _add(value: Any, to: Any) -> None:
    if isinstance(value, np.ndarray):
        to.update(f"{value.dtype}{value.shape}".encode())
        to.update(np.ascontiguousarray(value).data)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            _add(getattr(value, field.name), to)
    elif isinstance(value, tuple):
        for part in value:
            _add(part, to)
    else:
        to.update(json_line(value, lambda other: type(other).__name__).encode())


R = TypeVar("R")
MakeBatch = Callable[[Sequence[R], Sequence[str]], DataProto]
"""Maps (rows, their uids) to a batch."""


class RowLoader(Generic[R]):
    """An endless, resumable source of rows, in an order that the seed determines for each epoch."""

    def __init__(self, rows: Sequence[R], seed: int, make_batch: MakeBatch[R]) -> None:
        """`make_batch` makes a padded batch of rows and their uids."""
        self.rows, self._seed, self.make_batch = rows, seed, make_batch
        self._num_taken = 0

    def next_batch(self, count: int) -> DataProto:
        """Return the next `count` rows as a batch; the uids contain the epoch."""
        places = [divmod(self._num_taken + number, len(self.rows)) for number in range(count)]
        epochs = {epoch for epoch, _ in places}
        orders = {epoch: shuffled(len(self.rows), self._seed, epoch) for epoch in epochs}
        chosen = [(int(orders[epoch][place]), epoch) for epoch, place in places]
        self._num_taken += count

        names = [f"{number}-{epoch}" for number, epoch in chosen]
        return self.make_batch([self.rows[number] for number, _ in chosen], names)

    def __len__(self) -> int:
        """Number of rows in an epoch."""
        return len(self.rows)

    @property
    def epoch(self) -> int:
        """The epoch of the row that was taken last; the first epoch is 0."""
        return max(self._num_taken - 1, 0) // len(self.rows)

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's position. A resume needs only this and the config's seed."""
        return {"num_taken": self._num_taken, "num_rows": len(self.rows), "rows": self._digest}

    @cached_property
    def _digest(self) -> str:
        return digest_of_rows(self.rows)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to the position in `state`; raise an error if the rows have changed."""
        check_same_rows(state, self.state_dict())
        self._num_taken = state["num_taken"]
