"""Workers as written for verl.

They read torchrun's environment and open their own process group.
"""

from __future__ import annotations

import os

import numpy as np
import torch
import torch.distributed

from verl_like import (
    DataProto,
    Dispatch,
    Execute,
    Worker,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)


class BaseWorker(Worker):
    def __init__(self, config, role="critic"):
        super().__init__()
        self.config = config
        rank = int(os.environ.get("RANK", 0))
        world_size = int(os.environ.get("WORLD_SIZE", 1))
        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group(
                backend="cpu:gloo",
                rank=rank,
                world_size=world_size,
                init_method=os.environ.get("DIST_INIT_METHOD", None),
            )
        assert self.rank == rank
        assert self.world_size == torch.distributed.get_world_size()
        self._register_dispatch_collect_info(
            "actor" if role == "actor" else "critic", dp_rank=self.rank, is_collect=True
        )

    @staticmethod
    def rows(n):
        return {"x": torch.arange(n), "uid": np.array([f"u{i}" for i in range(n)], dtype=object)}


class PolicyWorker(BaseWorker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self):
        self.scale = self.config["scale"]

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    def compute_log_prob(self, data: DataProto):
        return DataProto.from_dict(tensors={"old_log_probs": data.batch["x"] * self.scale})

    @register(
        dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"), blocking=False
    )
    def update_actor(self, data: DataProto):
        loss = torch.ones(1)
        torch.distributed.all_reduce(loss)
        loss = loss.item() / self.world_size * 2
        return DataProto(meta_info={"metrics": [{"loss": loss}], "world_size": self.world_size})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def get_rank_info(self):
        return f"{self.rank}/{self.world_size}"

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def only_zero(self, value):
        assert self.rank == 0
        return value


class CriticWorker(BaseWorker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self):
        self.scale = self.config["scale"]

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_values(self, data: DataProto):
        return DataProto.from_dict(tensors={"values": data.batch["x"] * self.scale})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def update_critic(self, data: DataProto):
        return data.select(batch_keys=["values"], non_tensor_batch_keys=["uid"])
