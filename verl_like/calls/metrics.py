"""Metrics beside a batch: what a worker's method may return, and the values of all ranks as one.

A method whose mode collects a batch (a `DataProto` or a TensorDict) returns the batch, `(batch,
metrics)`, or metrics alone.
Metrics are a plain dict of numbers, strings, or lists of these. They travel in the call's header,
so a future that is passed on still travels as its batch.
"""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from verl_like.batch.protocol import DataProto
from verl_like.batch.tensordict_import import TensorDict
from verl_like.batch.tensordict_rows import rows_of
from verl_like.calls.messages import Header
from verl_like.errors import DispatchError

Metrics = dict[str, Any]


def split_result(result: Any, where: str) -> tuple[Any, Metrics | None]:
    """The payload and the metrics of what a method returned; `where` names the method and rank."""
    if isinstance(result, dict):
        return None, _plain_metrics(result, where)
    if isinstance(result, tuple) and len(result) == 2:
        batch, metrics = rows_of(result[0]), result[1]
        if isinstance(batch, DataProto) and isinstance(metrics, dict):
            return batch, _plain_metrics(metrics, where)
    return rows_of(result), None


def has_metrics_alone(headers: Sequence[Header], payloads: Sequence[Any], where: str) -> bool:
    """Whether the ranks returned metrics without a batch; refuses a mixture."""
    alone = []
    for header, payload in zip(headers, payloads, strict=True):
        if header.metrics is not None and payload is None:
            alone.append(header.rank)
    if alone and len(alone) < len(headers):
        others = [header.rank for header in headers if header.rank not in alone]
        raise DispatchError(
            f"{where} returned metrics alone on rank(s) {alone}, and something else on rank(s) "
            f"{others}. Return the same on every rank: a batch, (batch, metrics), or metrics."
        )
    return bool(alone)


def collect_metrics(headers: Sequence[Header]) -> dict[str, list[Any]] | None:
    """Name -> the values of these ranks, in their order; None if no rank returned metrics.

    A rank's own list is chained in. Ranks that held padding only are left out if others have some.
    """
    reporting = [header for header in headers if header.metrics is not None]
    if not reporting:
        return None
    with_real_rows = [header for header in reporting if not header.only_padding]

    collected: dict[str, list[Any]] = {}
    for header in with_real_rows or reporting:
        for name, value in (header.metrics or {}).items():
            values = value if isinstance(value, list) else [value]
            collected.setdefault(name, []).extend(values)
    return collected


def batch_alone(result: Any) -> Any:
    """What a future's `get()` gives, without its metrics: what another group is given."""
    if isinstance(result, tuple) and len(result) == 2:
        return result[0] if isinstance(result[0], DataProto | TensorDict) else result
    return result


def _plain_metrics(metrics: dict[Any, Any], where: str) -> Metrics:
    """The same names, with values that a header can carry."""
    plain: Metrics = {}
    for name, value in metrics.items():
        if not isinstance(name, str):
            raise DispatchError(
                f"{where} returned metrics with the key {name!r}, a {type(name).__name__}: names "
                "are strings."
            )
        if isinstance(value, list):
            plain[name] = [_plain_value(entry, name, where) for entry in value]
        else:
            plain[name] = _plain_value(value, name, where)
    return plain


def _plain_value(value: Any, name: str, where: str) -> Any:
    """A number or string of Python's own, of numpy's and torch's scalars too."""
    if type(value) in (float, int, bool, str):
        return value
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, np.generic | np.ndarray) and value.size == 1:
        value = value.item()
    if isinstance(value, str):
        return str(value)
    if isinstance(value, bool):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)

    shape = getattr(value, "shape", None)
    shown = f" of shape {tuple(shape)}" if shape is not None else ""
    raise DispatchError(
        f"{where} returned metric '{name}' as {type(value).__name__}{shown}: a metric is a number, "
        "a string, or a list of these. Put other values into the batch or its meta_info."
    )
