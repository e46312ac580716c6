"""One side of `bench_core`: the same driver code on verl-like's core, verl's, or plain Ray actors.

`bench_core.py` runs `python core_side.py ours|verl|bare` in a separate process; the last line
printed is JSON.
"""

from __future__ import annotations

import json
import os
import pickle
import statistics
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import ray
import torch

ROWS, WIDTH = 1024, 2048
SMALL_ROWS, SMALL_WIDTH = 8, 1536
SMALL_COLUMNS = ("input_ids", "position_ids", "old_log_probs", "values", "advantages", "returns")
"""Some of the `columns`: 0.4 MB at 8 x 1536."""
REPEATS = 5
ECHOES = 31
"""Number of times that a large batch is sent and returned.

On a virtual machine, one takes between 50 and 450 ms, because memory is newly allocated.
"""
LONG_WIDTH, LONG_MEAN = 4096, 410
"""Rows have geometric lengths, whose mean is a tenth of the width."""
CHANGED = "advantages"
"""The column that the echo worker changes in place."""


def columns(rows: int, width: int) -> dict[str, torch.Tensor]:
    """Return four int64 and five float32 columns: 109 MB at 1024 x 2048."""
    ids = ("input_ids", "attention_mask", "position_ids", "responses")
    floats = ("old_log_probs", "values", "advantages", "returns", "token_level_scores")
    integers = {name: torch.arange(rows * width).reshape(rows, width) % 997 for name in ids}
    return integers | {name: torch.rand(rows, width) for name in floats}


def padded_columns(rows: int, width: int, lengths: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the same columns for rows of these lengths, zero after them: 218 MB at 1024 x 4096."""
    inside = torch.arange(width) < lengths[:, None]
    return {name: column * inside for name, column in columns(rows, width).items()}


def geometric_lengths(rows: int, mean: int, width: int) -> torch.Tensor:
    """Return seeded lengths between 1 and `width`."""
    drawn = np.random.default_rng(0).geometric(1 / mean, rows)
    return torch.from_numpy(drawn).clamp(max=width)


def texts(rows: int, turn: int) -> dict[str, np.ndarray]:
    """Return two string columns: a name per row, and a text of a few hundred characters."""
    names = [f"{row}-{turn}" for row in range(rows)]
    prompts = [f"What is {row} + {turn}? " * 20 for row in range(rows)]
    return {"uid": np.array(names, dtype=object), "prompt": np.array(prompts, dtype=object)}


def median_of(work: Callable[[], Any], repeats: int = REPEATS) -> float:
    """Return the median seconds, after one run that does not count."""
    work()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def median_of_fresh(make: Callable[[int], Any], work: Callable[[Any], Any], repeats: int) -> float:
    """Return the median seconds for new data in every run; the first run does not count."""
    times = []
    for turn in range(repeats + 1):
        batch = make(turn)
        began = time.perf_counter()
        result = work(batch)
        times.append(time.perf_counter() - began)
        del batch, result
    return statistics.median(times[1:])


def seconds_of_padded_echo(side: str, api: SimpleNamespace, group: Any) -> float:
    """Return the seconds to echo rows of geometric lengths, in the layout that each side uses."""
    lengths = geometric_lengths(ROWS, LONG_MEAN, LONG_WIDTH)
    base: dict[str, Any] = padded_columns(ROWS, LONG_WIDTH, lengths)
    if side == "ours":
        from verl_like.batch.ragged import RaggedTensor

        first = next(iter(base.values()))
        spans = RaggedTensor.from_rectangle(first, lengths)
        base = {name: spans.like(column) for name, column in base.items()}

    def make(turn: int) -> Any:
        if side == "ours":
            columns = {
                name: column.with_values(column.values + turn) for name, column in base.items()
            }
        else:
            columns = {name: column + turn for name, column in base.items()}
        return api.DataProto.from_dict(columns)

    back = group.echo(make(1))
    assert all(torch.equal(back.batch[n], c) for n, c in make(1).batch.items()), "not what was sent"
    del back
    return median_of_fresh(make, group.echo, REPEATS)


def seconds_per_call(work: Callable[[], Any], calls: int) -> float:
    """Return the median over rounds of many calls."""
    return median_of(lambda: [work() for _ in range(calls)], repeats=7) / calls


def framework(side: str) -> SimpleNamespace:
    """Return the names with which a side's workers and driver are written."""
    if side == "verl":
        from verl import DataProto
        from verl.single_controller.base import Worker
        from verl.single_controller.base.decorator import Dispatch, register
        from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

        return SimpleNamespace(
            DataProto=DataProto,
            Worker=Worker,
            Dispatch=Dispatch,
            register=register,
            RayWorkerGroup=RayWorkerGroup,
            pool=lambda: RayResourcePool([2], use_gpu=False, max_colocate_count=1),
            later=lambda cls: RayClassWithInitArgs(cls=ray.remote(cls)),
        )

    import verl_like

    return SimpleNamespace(
        DataProto=verl_like.DataProto,
        Worker=verl_like.Worker,
        Dispatch=verl_like.Dispatch,
        register=verl_like.register,
        RayWorkerGroup=verl_like.RayWorkerGroup,
        pool=lambda: verl_like.RayResourcePool([2], cpus_per_process=1),
        later=verl_like.RayClassWithInitArgs,
    )


def echo_class(api: SimpleNamespace) -> type:
    """Return the class of a worker that returns its input."""
    proto, one_to_all = api.Dispatch.DP_COMPUTE_PROTO, api.Dispatch.ONE_TO_ALL

    class Echo(api.Worker):  # type: ignore[name-defined,misc]
        """Returns its input."""

        def __init__(self) -> None:
            super().__init__()

        @api.register(dispatch_mode=proto)
        def echo(self, data: Any) -> Any:
            return data

        @api.register(dispatch_mode=proto, blocking=False)
        def echo_later(self, data: Any) -> Any:
            return data

        @api.register(dispatch_mode=proto)
        def echo_changed(self, data: Any) -> Any:
            data.batch[CHANGED].add_(1.0)
            return data

        @api.register(dispatch_mode=one_to_all)
        def nothing(self) -> None:
            return None

        @api.register(dispatch_mode=one_to_all, blocking=False)
        def nap(self, seconds: float) -> None:
            time.sleep(seconds)

    return Echo


def grouped(side: str) -> dict[str, float]:
    """Measure worker groups (echo, chain, small calls, start, overlap), then the batch alone."""
    api = framework(side)
    echo_cls = echo_class(api)
    starts, groups = [], []
    for _ in range(3):
        began = time.perf_counter()
        group = api.RayWorkerGroup(resource_pool=api.pool(), ray_cls_with_init=api.later(echo_cls))
        group.nothing()
        starts.append(time.perf_counter() - began)
        groups.append(group)
    a, b = groups[:2]
    chain = a.echo_later if side == "verl" else a.echo.remote
    chain_on = b.echo_later if side == "verl" else b.echo.remote

    def large(turn: int) -> Any:
        tensors = {name: column + turn for name, column in base.items()}
        return api.DataProto.from_dict(tensors, non_tensors=texts(ROWS, turn))

    base = columns(ROWS, WIDTH)
    check_echo(a, large(1))
    batch = api.DataProto.from_dict(base)
    megabytes = sum(t.nbytes for t in base.values()) / 1e6
    tiny = api.DataProto.from_dict(columns(8, 16))
    tensors = columns(SMALL_ROWS, SMALL_WIDTH)
    small = api.DataProto.from_dict({name: tensors[name] for name in SMALL_COLUMNS})
    figures = {"batch_mb": megabytes, "start_2_workers_s": statistics.median(starts)}
    figures["echo_mb_per_s"] = megabytes / median_of_fresh(large, a.echo_changed, ECHOES)
    figures["padded_echo_ms"] = seconds_of_padded_echo(side, api, a) * 1e3
    figures["chain_s"] = median_of(lambda: chain_on(chain(batch)).get())
    figures["tiny_echo_ms"] = seconds_per_call(lambda: a.echo(tiny), 50) * 1e3
    figures["small_echo_ms"] = seconds_per_call(lambda: a.echo(small), 50) * 1e3
    figures["one_to_all_noop_ms"] = seconds_per_call(a.nothing, 100) * 1e3
    figures["two_naps_s"] = median_of(lambda: naps(side, a, b), 3)
    return figures | batch_alone(api.DataProto)


def check_echo(group: Any, batch: Any) -> None:
    """Check that an echo returns the batch with only the expected change."""
    back = group.echo_changed(batch)
    for name, column in batch.batch.items():
        expected = column + 1.0 if name == CHANGED else column
        assert torch.equal(back.batch[name], expected), f"{name} is not what was sent"
    for name, strings in batch.non_tensor_batch.items():
        assert back.non_tensor_batch[name].tolist() == strings.tolist(), name


def naps(side: str, a: Any, b: Any) -> None:
    """Make two groups sleep for half a second each, concurrently."""
    if side == "verl":
        ray.get(a.nap(0.5) + b.nap(0.5))
    else:
        from verl_like import gather

        gather(a.nap(0.5), b.nap(0.5))


def batch_alone(batch_cls: Any) -> dict[str, float]:
    """Measure the costs of a batch without any worker."""
    medium = batch_cls.from_dict(columns(ROWS // 2, WIDTH))
    quarter = batch_cls.from_dict(columns(ROWS // 8, WIDTH))
    small = columns(64, 32)
    half = len(small) // 2
    objects = {
        name: np.array([f"{name}-{row}" for row in range(64)], dtype=object)
        for name in ("uid", "data_source")
    }
    half_batch = batch_cls.from_dict(dict(list(small.items())[:half]), non_tensors=dict(objects))
    other = batch_cls.from_dict(dict(list(small.items())[half:]))
    whole = batch_cls.from_dict(small, non_tensors=dict(objects))
    names = list(small)[:3]

    def round_trip() -> Any:
        buffers: list[pickle.PickleBuffer] = []
        return pickle.loads(
            pickle.dumps(medium, protocol=5, buffer_callback=buffers.append), buffers=buffers
        )

    def unite() -> Any:
        return batch_cls(batch=half_batch.batch.copy(), non_tensor_batch=dict(objects)).union(other)

    copying = seconds_per_call(
        lambda: batch_cls(batch=half_batch.batch.copy(), non_tensor_batch=dict(objects)), 200
    )
    return {
        "dumps_loads_54mb_s": median_of(round_trip),
        "repeat_4_ms": median_of(lambda: quarter.repeat(4)) * 1e3,
        "construct_us": seconds_per_call(
            lambda: batch_cls.from_dict(small, non_tensors=dict(objects)), 500
        )
        * 1e6,
        "union_us": (seconds_per_call(unite, 200) - copying) * 1e6,
        "select_us": seconds_per_call(
            lambda: whole.select(batch_keys=names, non_tensor_batch_keys=["uid"]), 500
        )
        * 1e6,
        "slice_us": seconds_per_call(lambda: whole[:2], 500) * 1e6,
    }


@ray.remote(num_cpus=1)
class BareEcho:
    """Copies its input."""

    def echo(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return a private copy of every array, and change one of them."""
        copies = {name: array.copy() for name, array in arrays.items()}
        copies[CHANGED] += 1.0
        return copies

    def nothing(self) -> None:
        """Do nothing."""


def bare() -> dict[str, float]:
    """Measure the floor: two plain actors, and a dict of arrays, split and joined by the driver."""
    actors = [BareEcho.remote() for _ in range(2)]

    def echo(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        half = len(next(iter(arrays.values()))) // 2
        parts = [{k: v[:half] for k, v in arrays.items()}, {k: v[half:] for k, v in arrays.items()}]
        back = ray.get([actor.echo.remote(part) for actor, part in zip(actors, parts, strict=True)])
        return {name: np.concatenate([part[name] for part in back]) for name in arrays}

    def nothing() -> None:
        ray.get([actor.nothing.remote() for actor in actors])

    def large(turn: int) -> dict[str, np.ndarray]:
        return {name: array + turn for name, array in base.items()} | texts(ROWS, turn)

    base = {name: column.numpy() for name, column in columns(ROWS, WIDTH).items()}
    tiny = {name: column.numpy() for name, column in columns(8, 16).items()}
    tensors = columns(SMALL_ROWS, SMALL_WIDTH)
    small = {name: tensors[name].numpy() for name in SMALL_COLUMNS}
    megabytes = sum(array.nbytes for array in base.values()) / 1e6
    return {
        "echo_mb_per_s": megabytes / median_of_fresh(large, echo, ECHOES),
        "tiny_echo_ms": seconds_per_call(lambda: echo(tiny), 50) * 1e3,
        "small_echo_ms": seconds_per_call(lambda: echo(small), 50) * 1e3,
        "one_to_all_noop_ms": seconds_per_call(nothing, 100) * 1e3,
    }


def main() -> None:
    """Measure one side."""
    side = sys.argv[1]
    torch.set_num_threads(1)
    ray.init(
        "local", num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="ERROR"
    )
    figures = bare() if side == "bare" else grouped(side)
    print(json.dumps(figures), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
