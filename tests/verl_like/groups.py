"""Start a worker group on any backend: `start("child", {"adder": (Adder, (1,))}, [2])`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from verl_like import ClassWithInitArgs, LocalWorkerGroup, ResourcePool, create_colocated_worker_cls
from verl_like.calls.deadlines import Deadlines


@contextmanager
def start(
    backend: str,
    roles: Mapping[str, tuple[type, tuple[Any, ...]]],
    process_on_nodes: Sequence[int] = (2,),
    **options: Any,
) -> Iterator[Any]:
    """Context with a group of one role, or of several fused roles."""
    options.setdefault("deadlines", Deadlines(start_s=180, call_s=60))
    constructors = {role: ClassWithInitArgs(cls, *args) for role, (cls, args) in roles.items()}
    (name, single), *others = constructors.items()
    role_class = create_colocated_worker_cls(constructors) if others else single
    if backend == "ray":
        from verl_like import RayResourcePool, RayWorkerGroup

        with (
            RayResourcePool(list(process_on_nodes), cpus_per_process=0.5) as pool,
            RayWorkerGroup(pool, role_class, name_prefix=name, **options) as group,
        ):
            yield group
        return
    pool = ResourcePool(list(process_on_nodes))
    with LocalWorkerGroup(pool, role_class, name_prefix=name, **options) as group:
        yield group
