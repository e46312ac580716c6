"""A worker class and its constructor's arguments, which travel to the processes of a pool.

A driver makes them, alone or several fused; the backends construct the roles from them:

    RayWorkerGroup(pool, RayClassWithInitArgs(Critic, config))
    RayWorkerGroup(pool, create_colocated_worker_cls({"actor": a, "ref": b}))
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl_like.errors import PlacementError


class ClassWithInitArgs:
    """A worker class and its constructor's arguments, for a worker process to construct later."""

    def __init__(self, cls: type, *args: Any, **kwargs: Any) -> None:
        self.cls, self.args, self.kwargs = cls, args, kwargs

    def roles(self, default: str) -> dict[str, ClassWithInitArgs]:
        """The roles that one process will hold: this one, under a default name.

        Those that its class has beside itself (`create_colocated_worker_raw_cls`) come first.
        """
        if default in self.prefixed:
            raise PlacementError(
                f"name_prefix '{default}' is the name of a role in {self.cls.__name__}, too; take "
                "another."
            )
        return {**colocated_classes(self.cls), default: self}

    @property
    def prefixed(self) -> frozenset[str]:
        """The roles whose methods are called `<role>_<method>` on a group of all."""
        return frozenset(colocated_classes(self.cls))


class ColocatedClasses(ClassWithInitArgs):
    """Several roles for one process; made by `create_colocated_worker_cls`."""

    def __init__(self, class_dict: Mapping[str, ClassWithInitArgs]) -> None:
        """Roles are constructed in the order given."""
        super().__init__(object)
        self.class_dict = dict(class_dict)

    def roles(self, default: str) -> dict[str, ClassWithInitArgs]:
        """Every role by its name."""
        return self.class_dict

    @property
    def prefixed(self) -> frozenset[str]:
        """The names of all roles in the process."""
        return frozenset(self.class_dict)


def create_colocated_worker_cls(class_dict: Mapping[str, ClassWithInitArgs]) -> ColocatedClasses:
    """Fuse roles: one process per device holds one instance of each."""
    if not class_dict:
        raise PlacementError("create_colocated_worker_cls needs at least one role.")
    return ColocatedClasses(class_dict)


def colocated_classes(cls: type) -> dict[str, ClassWithInitArgs]:
    """The roles that a class of `create_colocated_worker_raw_cls` has in its process."""
    classes: dict[str, ClassWithInitArgs] = getattr(cls, "_colocated_classes", {})
    return classes
