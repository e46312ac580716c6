"""Worker classes for the tests; worker processes import them from here."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import threading
import time
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist

from verl_like import (
    DataProto,
    Dispatch,
    Execute,
    Worker,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)

PROTO = Dispatch.DP_COMPUTE_PROTO


def seen(data: DataProto, rank: int) -> DataProto:
    """Return every column as it arrived, and the rank."""
    tensors = dict(data.batch.items()) | {"rank": torch.full((len(data),), rank)}
    return DataProto.from_dict(tensors, dict(data.non_tensor_batch), meta_info=dict(data.meta_info))


def split_letters(group: Any, text: str) -> tuple[tuple[list[str]], dict[str, Any]]:
    """A user's dispatch function: one letter per worker."""
    return ([*text][: group.world_size],), {}


def join_letters(group: Any, outputs: list[str]) -> str:
    return "-".join(outputs)


LETTERS = {"dispatch_fn": split_letters, "collect_fn": join_letters}


class Modes(Worker):
    """One method for every dispatch and execute mode."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def one_to_all(self, value: Any) -> tuple[int, Any]:
        return self.rank, value

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def one_to_first(self, value: Any) -> tuple[int, Any]:
        return self.rank, value

    @register()
    def all_to_all(self, value: Any, *, other: Any = None) -> tuple[int, Any, Any]:
        return self.rank, value, other

    @register(execute_mode=Execute.RANK_ZERO)
    def all_to_first(self, value: Any) -> tuple[int, Any]:
        return self.rank, value

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def rank_zero(self, value: Any) -> tuple[int, Any]:
        return self.rank, value

    @register(dispatch_mode=Dispatch.DP_COMPUTE)
    def dp_compute(self, value: Any) -> tuple[int, Any]:
        return self.rank, value

    @register(dispatch_mode=Dispatch.DP_COMPUTE, execute_mode=Execute.RANK_ZERO)
    def dp_compute_first(self, value: Any) -> tuple[int, Any]:
        return self.rank, value

    @register(dispatch_mode=PROTO)
    def echo(self, data: DataProto) -> DataProto:
        return seen(data, self.rank)

    @register(dispatch_mode=PROTO, blocking=False)
    def echo_later(self, data: DataProto) -> DataProto:
        return seen(data, self.rank)

    @register(dispatch_mode=PROTO, execute_mode=Execute.RANK_ZERO)
    def echo_first(self, data: DataProto) -> DataProto:
        return seen(data, self.rank)

    @register(dispatch_mode=PROTO)
    def same(self, data: DataProto) -> DataProto:
        return data

    @register(dispatch_mode=PROTO)
    async def echo_async(self, data: DataProto) -> DataProto:
        await asyncio.sleep(0)
        return seen(data, self.rank)

    @register(dispatch_mode=PROTO)
    def twice(self, data: DataProto) -> DataProto:
        return data.repeat(2)

    @register(dispatch_mode=PROTO)
    def add(self, data: DataProto, more: DataProto) -> DataProto:
        return DataProto.from_dict({"x": data.batch["x"] + more.batch["x"]})

    @register(dispatch_mode=PROTO)
    def shards(self, data: DataProto) -> DataProto:
        shard = data.shard
        return DataProto(
            meta_info={"metrics": {"shard": (shard.index, shard.start, shard.rows, shard.total)}}
        )

    @register(dispatch_mode=PROTO)
    def with_metrics(self, data: DataProto) -> tuple[DataProto, dict[str, Any]]:
        metrics = {"sum": data.batch["x"].sum(), "ranks": [self.rank, self.rank + 0.5]}
        if self.rank == 0:
            metrics["first"] = np.float32(0.5)
        return seen(data, self.rank), metrics

    @register(dispatch_mode=PROTO)
    def metrics_alone(self, data: DataProto) -> dict[str, Any]:
        return {"sum": data.batch["x"].sum(), "ranks": [self.rank, self.rank + 0.5]}

    @register(dispatch_mode=PROTO)
    def metrics_on_the_first(self, data: DataProto) -> object:
        return {"rank": self.rank} if self.rank == 0 else data

    @register(dispatch_mode=PROTO)
    def breaks_its_promise(self, data: DataProto) -> DataProto:
        return cast("DataProto", {"rows": len(data)})

    @register(dispatch_mode=PROTO)
    def metrics_of_a_tensor(self, data: DataProto) -> dict[str, Any]:
        return {"lengths": data.batch["x"]}

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("actor"))
    def metrics_on_mesh(self, data: DataProto) -> tuple[DataProto, dict[str, Any]]:
        return seen(data, self.rank), {"rank": self.rank}

    @register(dispatch_mode=PROTO)
    def noise(self, data: DataProto) -> DataProto:
        drawn = torch.randn(len(data)) + float(np.random.rand())
        return DataProto.from_dict({"noise": drawn})

    @register(dispatch_mode=PROTO)
    def overwrite(self, data: DataProto) -> DataProto:
        data.batch["x"].fill_(-1)
        data.non_tensor_batch["o"][:] = "gone"
        return DataProto.from_dict({"x": data.batch["x"]})

    @register(dispatch_mode=PROTO)
    def returns_seven(self, data: DataProto) -> Any:
        return 7

    @register(dispatch_mode=PROTO)
    def loses_rows(self, data: DataProto) -> DataProto:
        return data[: len(data) - 1]

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def metric(self, data: DataProto) -> float:
        return float(data.batch["x"][: data.num_real_rows].sum())

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def chunks(self, data: DataProto) -> DataProto:
        return data

    @register(dispatch_mode=LETTERS)
    def letters(self, letter: str) -> Any:
        return letter * (self.rank + 1)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("actor"))
    def on_mesh(self, data: DataProto) -> DataProto:
        return seen(data, self.rank)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("actor"), blocking=False)
    def on_mesh_later(self, data: DataProto) -> DataProto:
        return seen(data, self.rank)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def make_mesh(self, tensor_parallel: int, seconds: float = 0.0, collects: bool = True) -> None:
        time.sleep(seconds)
        dp_rank, place = divmod(self.rank, tensor_parallel)
        self._register_dispatch_collect_info(
            "actor", dp_rank, is_collect=collects and place == tensor_parallel - 1
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def describe(self, value: Any) -> str:
        if isinstance(value, DataProto):
            return f"{len(value)} rows"
        return f"{type(value).__name__} {value}"


class Adder(Worker):
    """Adds a number to column x."""

    def __init__(self, amount: int = 0):
        super().__init__()
        self.amount = amount

    @register(dispatch_mode=PROTO)
    def add(self, data: DataProto) -> DataProto:
        data.batch["x"] += self.amount  # in a private copy
        return DataProto.from_dict({"x": data.batch["x"]}, {"o": data.non_tensor_batch["o"]})

    @register(dispatch_mode=PROTO, blocking=False)
    def add_slowly(self, data: DataProto) -> DataProto:
        time.sleep(data.meta_info["seconds"])
        return DataProto.from_dict({"x": data.batch["x"] + self.amount}, meta_info=data.meta_info)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sibling_amount(self, role: str) -> int | None:
        other = self.sibling(role)
        return None if other is None else other.amount

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def pid(self) -> int:
        return os.getpid()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def draw(self) -> float:
        return torch.rand(1).item()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def say(self, text: str) -> None:
        print(text)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def num_threads(self) -> int:
        return torch.get_num_threads()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def allreduce(self) -> float:
        self.open_process_group()
        value = torch.tensor(float(self.rank + 1))
        dist.all_reduce(value)
        return value.item()


class Sent(Exception):
    """Cannot be pickled."""

    def __reduce__(self) -> Any:
        raise TypeError("not this one")


class Faulty(Worker):
    """Fails in many ways."""

    def __init__(self) -> None:
        super().__init__()
        self.waits, self.stopped = threading.Event(), threading.Event()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def waits_to_be_stopped(self) -> str:
        self.waits.set()
        return "stopped" if self.stopped.wait(20) else "waited in vain"

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, concurrent=True)
    def is_waiting(self) -> bool:
        return self.waits.is_set()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, concurrent=True)
    def stop(self, value: object = None) -> object:
        self.stopped.set()
        return value

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, concurrent=True)
    async def raises_concurrently(self) -> None:
        raise FileNotFoundError(2, "no such thing", "there")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, concurrent=True)
    def returns_concurrently(self) -> None:
        return 4  # type: ignore[return-value]

    @register(dispatch_mode=PROTO)
    def raises(self, data: DataProto) -> DataProto:
        raise FileNotFoundError(2, "no such thing", "here")

    @register(dispatch_mode=PROTO)
    def raises_on_last(self, data: DataProto) -> DataProto:
        if self.rank == self.world_size - 1:
            raise KeyError("only here")
        return data

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def raises_unpicklable(self) -> None:
        raise Sent("kept back")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def returns_unpicklable(self) -> Any:
        return (number for number in range(3))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def returns_all_the_same(self) -> None:
        return 3  # type: ignore[return-value]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def sleeps(self, seconds: float) -> int:
        time.sleep(seconds)
        return self.rank

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def takes_memory(self, megabytes: int) -> None:
        blocks = [b"x" * (1 << 20) for _ in range(megabytes)]
        time.sleep(len(blocks))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def dies(self, how: str) -> None:
        """Kill the last rank; the others wait for it in a collective."""
        self.open_process_group()
        if self.rank == self.world_size - 1:
            time.sleep(0.3)
            if how == "exit":
                os._exit(3)
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def different_collectives(self) -> None:
        self.open_process_group()
        value = torch.ones(1)
        if self.rank == 0:
            dist.all_reduce(value)
        else:
            dist.broadcast(value, src=0)
            dist.barrier()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def leaves_the_others(self) -> None:
        """The last rank never reaches the barrier."""
        self.open_process_group()
        if self.rank < self.world_size - 1:
            dist.barrier()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def waits_for_itself(self) -> None:
        lock = threading.Lock()
        with lock:
            lock.acquire()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def holds_the_interpreter(self, seconds: int) -> None:
        ctypes.PyDLL(None).sleep(seconds)  # native code that does not give the lock back

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def meets_alone(self) -> None:
        if self.rank == 0:
            self.open_process_group()


class BadConstructor(Worker):
    def __init__(self) -> None:
        super().__init__()
        raise ValueError("no such model")


class Shadow(Worker):
    @register()
    def spawn(self) -> Any: ...
