"""The nodes of a run, found before its pools are planned, and the devices of this machine."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from trainer.config.schema import RunConfig
from trainer.groups.user_modules import modules_of_the_user
from verl_like.calls.waiting import Deadlines
from verl_like.errors import PlacementError
from verl_like.placement.pools import Node

NO_GPU = "trainer.device=cuda asks for GPUs, but"
WITHOUT_GPU = "Set trainer.device=auto or cpu to run on CPU slots."


def find_nodes(config: RunConfig, worker_code: Sequence[str]) -> list[Node]:
    """This machine, or the nodes of the Ray cluster, which is joined or started.

    `worker_code` are the dotted paths that workers import.
    """
    trainer = config.trainer
    if trainer.backend == "ray":
        return _join_cluster(config, worker_code)
    kind = "GPU" if local_device(trainer.device) == "cuda" else "CPU slot"
    return [Node("this machine", trainer.n_gpus_per_node, float(os.cpu_count() or 1), kind)]


def _join_cluster(config: RunConfig, worker_code: Sequence[str]) -> list[Node]:
    from verl_like.backends import ray as ray_backend

    trainer, settings = config.trainer, config.ray
    joins = settings.address or os.environ.get("RAY_ADDRESS")
    runtime_env = dict(settings.runtime_env)
    if joins and (modules := modules_of_the_user(worker_code)):
        runtime_env["py_modules"] = [*runtime_env.get("py_modules", []), *modules]
    limits = Deadlines.of(config.watch)
    ray_backend.connect(settings.address, settings.namespace, runtime_env, limits)

    nodes = ray_backend.cluster_nodes(trainer.n_gpus_per_node, use_gpu=trainer.device != "cpu")
    if trainer.device == "cuda" and not any(node.kind == "GPU" for node in nodes):
        raise PlacementError(
            f"{NO_GPU} none of the {len(nodes)} node(s) of the cluster has one. {WITHOUT_GPU}"
        )
    return nodes


def require_shared_folder(config: RunConfig, nodes: Iterable[Node]) -> None:
    """Where there is more than one node, all of them must see the run folder."""
    by_key = {node.key: node for node in nodes}
    if len(by_key) > 1:
        from verl_like.backends.ray import shared_folder

        folder = Path(config.trainer.default_local_dir)
        shared_folder.require_shared_folder(folder, by_key.values())


def local_device(device: str) -> str:
    """`trainer.device` for processes of this machine."""
    import torch

    has_gpu = torch.cuda.is_available()
    if device == "cuda" and not has_gpu:
        raise PlacementError(
            f"{NO_GPU} torch {torch.__version__} sees none on this machine. {WITHOUT_GPU}"
        )
    return ("cuda" if has_gpu else "cpu") if device == "auto" else device
