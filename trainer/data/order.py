"""The order of an epoch's prompts: theirs, a shuffled one, or that of a function of the user's.

    def hardest_first(num_prompts: int, epoch: int, seed: int) -> Sequence[int]: ...

named by `data.sampler=my_module.hardest_first`, gives the positions of the prompts that the epoch
takes, as many as there are; one may come twice and another not at all. A resumed run asks again, so
the answer may depend on nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from trainer.data.config import DataConfig
from verl_like.errors import ConfigError
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
