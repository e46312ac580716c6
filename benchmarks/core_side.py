"""One side of `bench_core`: the same workers and driver code on our core, on verl's, or (`bare`) on
plain Ray actors.

Run by `bench_core.py` in a process of its own, `python core_side.py ours|verl|bare`; the last line
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
from typing import Any

import numpy as np
import ray
import torch

ROWS, WIDTH = 1024, 2048
REPEATS = 5
ECHOES = 31
"""Repeats of a large batch's way there and back: fresh memory makes one take from 50 to 450 ms on a
virtual machine.
"""


def columns(rows: int, width: int) -> dict[str, torch.Tensor]:
    """Four int64 and five float32 columns: 109 MB at 1024 x 2048."""
    ids = ("input_ids", "attention_mask", "position_ids", "responses")
    floats = ("old_log_probs", "values", "advantages", "returns", "token_level_scores")
    made = {name: torch.arange(rows * width).reshape(rows, width) % 997 for name in ids}
    return made | {name: torch.rand(rows, width) for name in floats}


def median_of(work: Callable[[], Any], repeats: int = REPEATS) -> float:
    """Seconds, after one run that does not count."""
    work()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def best_per_call(work: Callable[[], Any], calls: int, rounds: int = 7) -> float:
    """Seconds a call: the median over rounds of many calls."""
    return median_of(lambda: [work() for _ in range(calls)], rounds) / calls


def grouped(side: str) -> dict[str, float]:
    """Worker groups: echo, chain, small calls, start, overlap; then the batch alone."""
    if side == "verl":
        from verl import DataProto
        from verl.single_controller.base import Worker
        from verl.single_controller.base.decorator import Dispatch, register
        from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

        def pool() -> Any:
            return RayResourcePool([2], use_gpu=False, max_colocate_count=1)

        def later(cls: type) -> Any:
            return RayClassWithInitArgs(cls=ray.remote(cls))

        def call_future(group: Any, batch: Any) -> Any:
            return group.echo_later(batch)
    else:
        from verl_like import (
            DataProto,
            Dispatch,
            RayClassWithInitArgs,
            RayResourcePool,
            RayWorkerGroup,
            Worker,
            register,
        )

        def pool() -> Any:
            return RayResourcePool([2], cpus_per_process=1)

        def later(cls: type) -> Any:
            return RayClassWithInitArgs(cls)

        def call_future(group: Any, batch: Any) -> Any:
            return group.echo.remote(batch)

    class Echo(Worker):
        """Gives back what it gets."""

        def __init__(self) -> None:
            super().__init__()

        @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
        def echo(self, data: DataProto) -> DataProto:
            return data

        @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
        def echo_later(self, data: DataProto) -> DataProto:
            return data

        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def nothing(self) -> None:
            return None

        @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
        def nap(self, seconds: float) -> None:
            time.sleep(seconds)

    starts, groups = [], []
    for _ in range(3):
        began = time.perf_counter()
        group = RayWorkerGroup(resource_pool=pool(), ray_cls_with_init=later(Echo))
        group.nothing()
        starts.append(time.perf_counter() - began)
        groups.append(group)
    a, b = groups[:2]
    batch = DataProto.from_dict(columns(ROWS, WIDTH))
    megabytes = sum(t.nbytes for t in batch.batch.values()) / 1e6
    tiny = DataProto.from_dict(columns(8, 16))
    back = a.echo(batch)
    assert all(torch.equal(back.batch[k], v) for k, v in batch.batch.items()), (
        "the echo is not what was sent"
    )
    del back
    figures = {"batch_mb": megabytes, "start_2_workers_s": statistics.median(starts)}
    figures["echo_mb_per_s"] = megabytes / median_of(lambda: a.echo(batch), ECHOES)
    figures["chain_s"] = median_of(lambda: call_future(b, call_future(a, batch)).get())
    figures["tiny_echo_ms"] = best_per_call(lambda: a.echo(tiny), 50) * 1e3
    figures["one_to_all_noop_ms"] = best_per_call(a.nothing, 100) * 1e3
    figures["two_naps_s"] = median_of(lambda: naps(side, a, b), 3)
    return figures | batch_alone(DataProto)


def naps(side: str, a: Any, b: Any) -> None:
    """Two groups asleep for half a second each, at once."""
    if side == "verl":
        ray.get(a.nap(0.5) + b.nap(0.5))
    else:
        from verl_like import gather

        gather(a.nap(0.5), b.nap(0.5))


def batch_alone(batch_cls: Any) -> dict[str, float]:
    """What a batch costs without any worker."""
    medium = batch_cls.from_dict(columns(ROWS // 2, WIDTH))
    quarter = batch_cls.from_dict(columns(ROWS // 8, WIDTH))
    small = columns(64, 32)
    half = len(small) // 2
    objects = {
        name: np.array([f"{name}-{row}" for row in range(64)], dtype=object)
        for name in ("uid", "data_source")
    }
    one = batch_cls.from_dict(dict(list(small.items())[:half]), non_tensors=dict(objects))
    other = batch_cls.from_dict(dict(list(small.items())[half:]))
    whole = batch_cls.from_dict(small, non_tensors=dict(objects))
    names = list(small)[:3]

    def round_trip() -> Any:
        buffers: list[pickle.PickleBuffer] = []
        return pickle.loads(
            pickle.dumps(medium, protocol=5, buffer_callback=buffers.append), buffers=buffers
        )

    def unite() -> Any:
        return batch_cls(batch=one.batch.copy(), non_tensor_batch=dict(objects)).union(other)

    copying = best_per_call(
        lambda: batch_cls(batch=one.batch.copy(), non_tensor_batch=dict(objects)), 200
    )
    return {
        "dumps_loads_54mb_s": median_of(round_trip),
        "repeat_4_ms": median_of(lambda: quarter.repeat(4)) * 1e3,
        "construct_us": best_per_call(
            lambda: batch_cls.from_dict(small, non_tensors=dict(objects)), 500
        )
        * 1e6,
        "union_us": (best_per_call(unite, 200) - copying) * 1e6,
        "select_us": best_per_call(
            lambda: whole.select(batch_keys=names, non_tensor_batch_keys=["uid"]), 500
        )
        * 1e6,
        "slice_us": best_per_call(lambda: whole[:2], 500) * 1e6,
    }


def bare() -> dict[str, float]:
    """The floor: two plain actors, a dict of numpy arrays, split and joined by the driver, copied
    once by the actor.
    """

    @ray.remote(num_cpus=1)
    class Echo:
        """Copies what it gets."""

        def echo(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            return {name: array.copy() for name, array in arrays.items()}

        def nothing(self) -> None:
            return None

    actors = [Echo.remote() for _ in range(2)]

    def echo(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        half = len(next(iter(arrays.values()))) // 2
        parts = [{k: v[:half] for k, v in arrays.items()}, {k: v[half:] for k, v in arrays.items()}]
        back = ray.get([actor.echo.remote(part) for actor, part in zip(actors, parts, strict=True)])
        return {name: np.concatenate([part[name] for part in back]) for name in arrays}

    batch = {k: v.numpy() for k, v in columns(ROWS, WIDTH).items()}
    tiny = {k: v.numpy() for k, v in columns(8, 16).items()}
    megabytes = sum(v.nbytes for v in batch.values()) / 1e6
    return {
        "echo_mb_per_s": megabytes / median_of(lambda: echo(batch), ECHOES),
        "tiny_echo_ms": best_per_call(lambda: echo(tiny), 50) * 1e3,
        "one_to_all_noop_ms": best_per_call(
            lambda: ray.get([a.nothing.remote() for a in actors]), 100
        )
        * 1e3,
    }


def main() -> None:
    """Measure one side."""
    side = sys.argv[1]
    torch.set_num_threads(1)
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    figures = bare() if side == "bare" else grouped(side)
    print(json.dumps(figures), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
