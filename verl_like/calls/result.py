"""The results of a worker's methods: a batch, metrics, or both as one `CallResult`.

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_values(self, data: DataProto) -> DataProto: ...       # get() gives a DataProto

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def update_critic(self, data: DataProto) -> dict[str, Any]: ...  # get(): name -> list by rank

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_log_prob(self, data: DataProto) -> CallResult: ...        # get() gives a CallResult

The annotation declares the form (`declared_form`), and each worker checks the result against it
(`split_result`). The result of a method without an annotation may have any of the three forms, as
in verl. Metrics travel in the call's header, so a future that is passed on travels as its batch.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, get_origin

import numpy as np
import torch

from verl_like.batch.protocol import DataProto
from verl_like.calls.messages import ONLY_BATCH, ONLY_METRICS, WITH_METRICS, Header
from verl_like.errors import DispatchError


class CallResult(NamedTuple):
    """A batch and its metrics: the result of a method, and of `get()` on its future.

    Example:

        class Scorer(Worker):
            @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
            def score(self, data: DataProto) -> CallResult:
                scores = DataProto.from_dict({"scores": torch.zeros(len(data))})
                return CallResult(scores, {"entropy": 1.2})

    On the driver, `batch, metrics = group.score(data)` has the rows of all ranks, and
    `metrics["entropy"]` is [1.2, 1.3] from two ranks.

    Attributes:
        batch: a `DataProto`; None if there are only metrics.
        metrics: name -> a number, a string, or a list of these; on the driver, name -> the list
            over the ranks.
    """

    batch: Any = None
    metrics: dict[str, Any] = {}

    @classmethod
    def of(cls, value: Any) -> CallResult:
        """Return the value of a future as a `CallResult`, whatever form its method declares.

        It includes the metrics that verl's workers put into `meta_info["metrics"]` of a batch.
        """
        if isinstance(value, dict):
            return cls(None, value)
        batch, metrics = value if isinstance(value, tuple) else (value, {})
        if isinstance(batch, DataProto):
            metrics = batch.meta_info.get("metrics", {}) | metrics
        return cls(batch, metrics)


_FORMS = {DataProto: ONLY_BATCH, dict: ONLY_METRICS, CallResult: WITH_METRICS, tuple: WITH_METRICS}
_NO_RESULT = (int, float, str, bool, list, torch.Tensor, np.ndarray)


def declared_form(method: Callable[..., Any]) -> str:
    """Return the form that a method's annotation declares, or "" if it declares none."""
    annotation = getattr(method, "__annotations__", {}).get("return")
    if isinstance(annotation, str):
        try:
            annotation = eval(annotation, getattr(method, "__globals__", {}))
        except Exception:  # noqa: BLE001 - the name exists only for type checkers
            return ""
    kind: Any = get_origin(annotation) or annotation
    if kind in _NO_RESULT:
        name = getattr(method, "__qualname__", method)
        raise DispatchError(
            f"{name} is declared to return {kind.__name__}; a data-parallel method must return a "
            "DataProto, metrics (a dict), or both (verl_like.extend.CallResult). To collect one "
            "value per rank, register it with Dispatch.DP_COMPUTE_METRIC."
        )
    return _FORMS.get(kind, ONLY_METRICS if kind is Mapping else "")


def split_result(value: Any, declared: str, where: str) -> tuple[Any, dict[str, Any] | None, str]:
    """Return payload, metrics and form of a result; `where` names the method and rank."""
    payload, metrics, form = value, None, type(value).__name__
    if isinstance(value, dict):
        payload, metrics, form = None, value, ONLY_METRICS
    elif isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], dict):
        payload, metrics, form = value[0], value[1], WITH_METRICS
    elif isinstance(payload, DataProto):
        form = ONLY_BATCH
    if declared and form != declared and value is not None:
        raise DispatchError(f"{where} returned {form}, but is declared to return {declared}.")
    if metrics is None:
        return payload, None, form
    plain: dict[str, Any] = {}
    for name, entry in metrics.items():
        if not isinstance(name, str):
            raise DispatchError(
                f"{where} returned a metric with the key {name!r} ({type(name).__name__}). Keys of "
                "metrics must be strings."
            )
        if isinstance(entry, list):
            plain[name] = [_plain_value(element, name, where) for element in entry]
        else:
            plain[name] = _plain_value(entry, name, where)
    return payload, plain, form


def result_form(headers: Sequence[Header], where: str) -> str:
    """Return the form of these ranks' results: `BOTH` if any rank returned metrics with its batch.

    Raise if a result has none of the forms, or if only some ranks returned metrics alone.
    """
    forms = {header.rank: header.returned for header in headers}
    alone = [rank for rank, form in forms.items() if form == ONLY_METRICS]
    if alone and len(alone) < len(forms):
        others = [rank for rank in forms if rank not in alone]
        raise DispatchError(
            f"{where} returned only metrics on rank(s) {alone}, and something else on rank(s) "
            f"{others}. Return the same on every rank: a batch, (batch, metrics), or metrics."
        )
    for rank, form in forms.items():
        if form not in (ONLY_BATCH, ONLY_METRICS, WITH_METRICS):
            raise DispatchError(
                f"{where} returned {form} on rank {rank}; a data-parallel method must return a "
                "DataProto, (DataProto, metrics) or a dict of metrics. Convert a TensorDict with "
                "DataProto.from_tensordict(). To collect one value per rank, register it with "
                "Dispatch.DP_COMPUTE_METRIC."
            )
    if WITH_METRICS in forms.values():
        return WITH_METRICS
    return ONLY_METRICS if alone else ONLY_BATCH


def collect_metrics(headers: Sequence[Header]) -> dict[str, list[Any]]:
    """Return name -> the values of these ranks, in their order.

    If a rank's value is a list, its elements are added. Ranks with only padding are left out,
    unless all ranks have only padding.
    """
    reporting = [header for header in headers if header.metrics is not None]
    with_real_rows = [header for header in reporting if not header.only_padding]

    collected: dict[str, list[Any]] = {}
    for header in with_real_rows or reporting:
        for name, value in (header.metrics or {}).items():
            values = value if isinstance(value, list) else [value]
            collected.setdefault(name, []).extend(values)
    return collected


def _plain_value(value: Any, name: str, where: str) -> Any:
    """Convert a scalar of Python, numpy or torch to a Python number or string."""
    if type(value) in (float, int, bool, str):
        return value
    if isinstance(value, torch.Tensor | np.generic | np.ndarray) and math.prod(value.shape) == 1:
        value = value.item()
    if isinstance(value, str):
        return str(value)
    if isinstance(value, numbers.Integral):
        return value if isinstance(value, bool) else int(value)
    if isinstance(value, numbers.Real):
        return float(value)

    shape = getattr(value, "shape", None)
    shown = f" of shape {tuple(shape)}" if shape is not None else ""
    raise DispatchError(
        f"{where} returned metric '{name}' as {type(value).__name__}{shown}: a metric is a "
        "number, a string, or a list of these. Put other values into the batch or its meta_info."
    )
