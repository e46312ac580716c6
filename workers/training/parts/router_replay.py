"""Router replay (`router_replay.mode=R3`): tokens go to the experts that the rollout chose."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from workers.models.routing import Routers
from workers.training.model import Model, Part

if TYPE_CHECKING:
    from workers.training.packing import Feed


class RouterReplay(Part):
    """Makes routers choose the experts that the rows name."""

    routers: Routers

    def change(self, model: Model) -> None:
        """Find the routers of all layers."""
        self.routers = Routers(model.module)

    def computing(self) -> AbstractContextManager[None]:
        """Context in which routers choose the experts of the last feed."""
        return self.routers.replaying()

    def fed(self, feed: Feed) -> None:
        """Use the experts of this feed from now on."""
        self.routers.replay(feed.routed)
