"""Linear weights in int8 (`quantization=int8`), which no rank ever stores in float32."""

from __future__ import annotations

from workers.models.quantize import quantize_linears
from workers.training.model import Model, Part


class Int8(Part):
    """Quantizes each weight as it is loaded."""

    def change(self, model: Model) -> None:
        """Allocate int8 weights."""
        quantize_linears(model.module, model.device)
