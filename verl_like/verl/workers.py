"""Workers that call the other roles of their process, as verl's do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from verl_like.calls.group import ClassWithInitArgs
from verl_like.errors import PlacementError
from verl_like.process.worker import Worker


class ColocatedWorker(Worker):
    """A worker that has the other roles of its process as attributes."""

    _colocated_classes: ClassVar[dict[str, ClassWithInitArgs]] = {}

    def __getattr__(self, name: str) -> Any:
        """Return the worker of another role."""
        worker = self.sibling(name) if name in type(self)._colocated_classes else None
        if worker is not None:
            return worker
        raise AttributeError(f"{type(self).__name__} has no attribute '{name}'")


def create_colocated_worker_raw_cls(
    class_dict: Mapping[str, ClassWithInitArgs],
) -> type[ColocatedWorker]:
    """Return a base class with which your worker can call the other roles of its process.

    For example, with a method that calls both roles:

        class Hybrid(create_colocated_worker_raw_cls({"actor": actor, "critic": critic})):
            @register(dispatch_mode=Dispatch.ONE_TO_ALL)
            def both(self, x):
                return self.critic.sub(self.actor.add(x))

        group = RayWorkerGroup(pool, RayClassWithInitArgs(Hybrid))
        group.both(1)
        group.fuse(["actor", "critic"])    # group.actor.add(1), as well as group.actor_add(1)
    """
    if not class_dict:
        raise PlacementError("create_colocated_worker_raw_cls needs at least one role.")
    for role in class_dict:
        if hasattr(ColocatedWorker, role):
            raise PlacementError(
                f"role '{role}' would be shadowed by an attribute that every worker has. Rename "
                "the role."
            )
    name = "_".join(["Colocated", *class_dict])
    return type(name, (ColocatedWorker,), {"_colocated_classes": dict(class_dict)})
