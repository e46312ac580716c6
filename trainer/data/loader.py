"""The order in which rows come, a digest of them, and endless rows as batches.

The order of an epoch's prompts is theirs, a shuffled one, or that of a function of the user's:

    def hardest_first(num_prompts: int, epoch: int, seed: int) -> Sequence[int]: ...

named by `data.sampler=my_module.hardest_first`, gives the positions of the prompts that the epoch
takes, as many as there are; one may come twice and another not at all. A resumed run asks again, so
the answer may depend on nothing else.
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
from verl_like.errors import CheckpointError, ConfigError
from verl_like.files import json_line
from verl_like.registry import load_object
from verl_like.signatures import Call, check_call

Positions = np.ndarray[Any, Any]
_of_last_epoch = lru_cache(maxsize=1)
"""Every batch asks for the whole order."""


def epoch_order(config: DataConfig, seed: int, num_prompts: int) -> Callable[[int], Positions]:
    """Epoch -> positions of its prompts; the one asked for last is kept."""
    if config.sampler is None:
        return _of_last_epoch(lambda epoch: _own_order(config.shuffle, seed, num_prompts, epoch))

    sampler = load_object(config.sampler, "data.sampler")
    call = Call(by_name=("num_prompts", "epoch", "seed"))
    check_call(sampler, f"data.sampler={config.sampler}", call)

    @_of_last_epoch
    def ordered(epoch: int) -> Positions:
        found = sampler(num_prompts=num_prompts, epoch=epoch, seed=seed)
        return _checked(config.sampler, found, num_prompts)

    return ordered


def _own_order(shuffles: bool, seed: int, num_prompts: int, epoch: int) -> Positions:
    if not shuffles:
        return np.arange(num_prompts)
    return np.random.default_rng([seed, epoch]).permutation(num_prompts)


def _checked(name: str | None, found: Any, num_prompts: int) -> Positions:
    """The user's order, if it is one of that many positions."""
    order = np.asarray(found)
    is_whole = order.shape == (num_prompts,) and np.issubdtype(order.dtype, np.integer)
    if not is_whole or order.min() < 0 or order.max() >= num_prompts:
        raise ConfigError(
            f"data.sampler={name} gave {order.dtype} of shape {list(order.shape)}; it must give "
            f"{num_prompts} positions from 0 to {num_prompts - 1}."
        )
    return order


OTHER_ROWS = (
    "Give the data as it was, or train on this data in another trainer.default_local_dir, from the "
    "weights that `verl-like export` takes out of the checkpoint."
)
"""What to do about rows that are not those of the run so far."""


def refuse_other_rows(saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse a saved place among rows that are others now: by their numbers, then by `rows`."""
    sizes = {name: size for name, size in now.items() if name not in ("num_taken", "rows")}
    differs = [
        f"{name}: saved {saved[name]}, now {size}"
        for name, size in sizes.items()
        if saved[name] != size
    ]
    if not differs and saved["rows"] != now["rows"]:
        number = next(iter(sizes.values()))
        differs.append(f"as many ({number}), but of other contents or in another order")
    if differs:
        raise CheckpointError(
            f"The saved position is one among other rows ({'; '.join(differs)}). {OTHER_ROWS}"
        )


def digest_of_rows(rows: Iterable[Any]) -> str:
    """A hash of tokens, texts and numbers; other values of a row count by their type."""
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
"""(rows, their uids) -> a batch."""


class RowLoader(Generic[R]):
    """Endless rows, epoch after epoch in an order from the seed; a resumed one goes on in place."""

    def __init__(self, rows: Sequence[R], seed: int, make_batch: MakeBatch[R]) -> None:
        """`make_batch` pads rows, with their uids, to one batch."""
        self.rows, self._seed, self.make_batch = rows, seed, make_batch
        self._num_taken = 0

    def take(self, count: int) -> DataProto:
        """The next rows as a batch, with uids of their epochs."""
        places = [divmod(self._num_taken + number, len(self.rows)) for number in range(count)]
        orders = {epoch: self._order(epoch) for epoch, _ in places}
        chosen = [(int(orders[epoch][place]), epoch) for epoch, place in places]
        self._num_taken += count

        names = [f"{number}-{epoch}" for number, epoch in chosen]
        return self.make_batch([self.rows[number] for number, _ in chosen], names)

    def __len__(self) -> int:
        """Rows in an epoch."""
        return len(self.rows)

    @property
    def epoch(self) -> int:
        """The epoch of the row that was taken last, the first being 0."""
        return max(self._num_taken - 1, 0) // len(self.rows)

    def _order(self, epoch: int) -> NDArray[np.int64]:
        return np.random.default_rng([self._seed, epoch]).permutation(len(self.rows))

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands; with the seed in the config, all that a resume needs."""
        return {
            "num_taken": self._num_taken,
            "num_rows": len(self.rows),
            "rows": self._digest,
        }

    @cached_property
    def _digest(self) -> str:
        return digest_of_rows(self.rows)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to where `state` was taken; other rows are refused."""
        refuse_other_rows(state, self.state_dict())
        self._num_taken = state["num_taken"]
