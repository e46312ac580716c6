"""A worker that calls the other roles of its process, and takes TensorDicts, as verl's do."""

from __future__ import annotations

import os

import torch
from tensordict import NonTensorData, TensorDict

from verl_like import (
    ClassWithInitArgs,
    Dispatch,
    Worker,
    create_colocated_worker_raw_cls,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)


class Adder(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def add(self, x):
        return x + self.rank

    def plain(self, x, y=0):
        return self.rank, x, y


class Scaler(Worker):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    @register()
    def scale(self, x):
        return x * self.factor


class Inner(Worker):
    """Created by a worker during a call, with its own mesh."""

    def __init__(self):
        self._register_dispatch_collect_info("train", dp_rank=self.rank, is_collect=True)


ROLES = {"adder": ClassWithInitArgs(Adder), "scaler": ClassWithInitArgs(Scaler, 10)}
NUMBERED = make_nd_compute_dataproto_dispatch_fn(mesh_name="all")


class Hybrid(create_colocated_worker_raw_cls(ROLES)):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def both(self, x):
        return self.scaler.scale(self.adder.add(x))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self):
        self.set_dispatch_collect(mesh_name="all", **Inner().get_dispatch_collect())

    def getenv(self, key):
        return os.environ.get(key)

    @register(dispatch_mode=NUMBERED)
    def double(self, data: TensorDict) -> TensorDict:
        """Change the chunk, and count its rows."""
        data["x"] *= 2
        data["length"] = torch.tensor([len(row) for row in data["ids"].unbind()])
        data["top_p"] = NonTensorData(data["top_p"] + self.rank)
        return data

    @register(dispatch_mode=NUMBERED, blocking=False)
    def double_later(self, data: TensorDict):
        return self.double(data), {"rows": data.shard.rows}

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def chunks(self, data: TensorDict) -> TensorDict:
        return data.select("x")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def total(self, data: TensorDict) -> int:
        return int(data["x"].sum())

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def report(self, data: TensorDict) -> TensorDict:
        """Return values without rows."""
        return TensorDict({"sum": NonTensorData(int(data["x"].sum()))}, batch_size=[])
