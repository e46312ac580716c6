"""Worker classes for the tests; worker processes import them from here."""

from __future__ import annotations

import os
import signal
import time

import torch
import torch.distributed as dist

from verl_like import DataProto, Dispatch, Execute, Worker, register


class Adder(Worker):
    """Adds a number to column x."""

    def __init__(self, amount: int = 0):
        super().__init__()
        self.amount = amount

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def add(self, data: DataProto) -> DataProto:
        data.batch["x"] += self.amount  # a private copy: nobody else may see this
        y = data.batch["x"] + 100 * self.rank
        return DataProto.from_dict({"y": y}, {"o": data.non_tensor_batch["o"]}, meta_info={"amount": self.amount})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def add_y(self, data: DataProto) -> DataProto:
        return DataProto.from_dict({"y": data.batch["y"] + self.amount})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def total(self, n: int) -> int:
        return n + self.rank

    @register(dispatch_mode=Dispatch.ALL_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def first(self, n: int) -> int:
        return n + self.amount

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def boom(self, data: DataProto) -> DataProto:
        raise FileNotFoundError(2, "no such thing", "here")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def pids(self) -> int:
        return os.getpid()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def see(self, role: str) -> int:
        return self.sibling(role).amount

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def allreduce(self) -> float:
        self.open_process_group()
        value = torch.tensor(float(self.rank + 1))
        dist.all_reduce(value)
        return value.item()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def die(self, status: int) -> None:
        if self.rank == self.world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
