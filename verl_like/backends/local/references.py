"""References to results that lie in this process, or will: `Done` values and futures."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future
from concurrent.futures import wait as wait_futures
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, eq=False)
class Done:
    """A reference to something that is there already."""

    value: Any


def resolve(value: Any) -> Any:
    """References anywhere in a message's lists and tuples, as values; waits for them."""
    if isinstance(value, Future):
        return value.result()
    if isinstance(value, Done):
        return value.value
    if type(value) in (list, tuple):
        return type(value)(map(resolve, value))
    return value


def wait_for_any(references: Sequence[Any], seconds: float) -> list[Any]:
    """The references that are answered or have failed: at least one, unless the time runs out."""
    here = [r for r in references if isinstance(r, Done)]
    left = [r for r in references if not isinstance(r, Done)]
    return here + list(wait_futures(left, 0.0 if here else seconds, FIRST_COMPLETED).done)
