"""Whether a role's model can lie over ranks as its `parallel` says.

Asked before a device is taken, of the model's class without weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workers.memory import HeldModel


def check_axes(held: HeldModel) -> None:
    """Refuse axes that the model cannot have, with the sizes that it can."""
    sharding = held.sharding
    if sharding.tp > 1:
        from workers.models.memory_shapes import meta_model
        from workers.parallel import tensor

        tensor.check(meta_model(held.model, held.head), sharding.tp, f"{held.axes_key}.tp")
