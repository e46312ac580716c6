"""Our names for the names that verl's tests import."""

from __future__ import annotations

from pathlib import Path

HERE = "verl_like"
STAND_INS = "tests.verl_suite.stand_ins"

_RAY = (
    "RayClassWithInitArgs",
    "RayResourcePool",
    "RayWorkerGroup",
    "ResourcePoolManager",
    "create_colocated_worker_cls",
    "create_colocated_worker_raw_cls",
    "merge_resource_pool",
    "split_resource_pool",
)
_DECORATOR = (
    "Dispatch",
    "Execute",
    "make_nd_compute_dataproto_dispatch_fn",
    "register",
    "register_dispatch_mode",
    "update_dispatch_mode",
)
_PROTOCOL = ("DataProto", "DataProtoFuture", "DataProtoItem")
_PARTITIONS = (
    "get_group_balanced_partitions",
    "get_reverse_idx",
    "get_seqlen_balanced_partitions",
)

MODULES: dict[str, dict[str, tuple[str, ...]]] = {
    "verl": {HERE: ("DataProto",)},
    "verl.protocol": {HERE: _PROTOCOL, STAND_INS: ("DataProtoConfig",)},
    "verl.single_controller": {},
    "verl.single_controller.base": {
        HERE: ("ClassWithInitArgs", "ResourcePool", "Worker", "WorkerGroup")
    },
    "verl.single_controller.base.decorator": {HERE: _DECORATOR},
    "verl.single_controller.base.worker": {HERE: ("Worker",)},
    "verl.single_controller.ray": {HERE: _RAY},
    "verl.single_controller.ray.base": {HERE: _RAY},
    "verl.utils": {},
    "verl.utils.device": {STAND_INS: ("get_device_name", "get_nccl_backend")},
    "verl.utils.model": {STAND_INS: ("create_random_mask",)},
    "verl.utils.ray_utils": {},
    "verl.utils.seqlen_balancing": {
        "verl_like.balance": _PARTITIONS,
        STAND_INS: ("ceildiv",),
    },
    "verl.utils.tensordict_utils": {STAND_INS: ("contiguous", "get_tensordict")},
}
RENAMED = {
    "verl.single_controller.ray.base": {
        "create_colocated_worker_cls_fused": "create_colocated_worker_cls"
    }
}
"""Names that are another one here."""


def write_alias(folder: Path) -> None:
    """Create a package `verl` in a folder, for the tests and worker processes to import."""
    for module, imports in MODULES.items():
        lines = [f"from {source} import {', '.join(names)}" for source, names in imports.items()]
        lines += [f"{name} = {ours}" for name, ours in RENAMED.get(module, {}).items()]
        lines.append(f"from {STAND_INS} import absent_names")
        lines.append(f"__getattr__ = absent_names({module!r}, {[*MODULES]})")
        if module == "verl":
            lines += ["from verl_like import scatter_lists", "scatter_lists()"]
        path = folder.joinpath(*module.split("."))
        path.mkdir(parents=True, exist_ok=True)
        (path / "__init__.py").write_text("\n".join(lines) + "\n", encoding="utf-8")
