"""A worker that calls the other roles of its process, as verl's do."""

from __future__ import annotations

import os

from tensordict import TensorDict

from verl_like import (
    ClassWithInitArgs,
    DataProto,
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


ROLES = {"adder": ClassWithInitArgs(Adder), "scaler": ClassWithInitArgs(Scaler, 10)}
NUMBERED = make_nd_compute_dataproto_dispatch_fn(mesh_name="all")


class Hybrid(create_colocated_worker_raw_cls(ROLES)):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def both(self, x):
        return self.scaler.scale(self.adder.add(x))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self):
        self._register_dispatch_collect_info("all", self.rank, True)

    def getenv(self, key):
        return os.environ.get(key)

    @register(dispatch_mode=NUMBERED)
    def unchanged(self, data):
        return data

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def tensordict(self, data: DataProto):
        return data.to_tensordict()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def total(self, data: TensorDict) -> int:
        return int(data["x"].sum())
