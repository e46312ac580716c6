"""LoRA adapters (`model.lora_rank`): only the adapters and a scalar head are trained."""

from __future__ import annotations

from workers.models.lora import add_adapter
from workers.training.model import Model, Part


class Lora(Part):
    """Adds adapters to linear layers and freezes the other weights."""

    def change(self, model: Model) -> None:
        """Add the adapters."""
        add_adapter(model.module, model.model_config)
