"""Expert parallelism (`parallel.ep`): each rank has some experts, and tokens are sent to them."""

from __future__ import annotations

from workers.parallel.experts import spread_experts
from workers.training.model import Model, Part


class ExpertSpread(Part):
    """Keeps only this rank's experts of every layer."""

    def change(self, model: Model) -> None:
        """Spread the experts over the ranks."""
        spread_experts(model.module, model.groups.ep_mesh)
