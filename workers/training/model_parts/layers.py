"""Parts that change the layers of a model by one call: int8, nf4, LoRA, experts, routers, matrices.

The modules of expert and tensor parallelism are imported only if the part is used.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from workers.columns import ROUTED
from workers.models.lora import add_adapter
from workers.models.quantize import check_nf4, quantize_base, quantize_linears
from workers.models.routing import Routers
from workers.training.microbatch import RowColumns
from workers.training.sharded_model import Model, ModelPart

if TYPE_CHECKING:
    from workers.parallel.tensor import ModuleSplit
    from workers.training.passes.packing import Feed


class Int8(ModelPart):
    """Int8 weights of linear layers (`quantization=int8`)."""

    def change(self, model: Model) -> None:
        """Allocate int8 weights; each weight is quantized as it is loaded."""
        quantize_linears(model.module, model.device)


class NF4(ModelPart):
    """A base of 4-bit weights (`quantization=nf4`)."""

    def check(self, model: Model) -> None:
        """Reject settings that do not work with a 4-bit base."""
        check_nf4(model.model_config)

    def change(self, model: Model) -> None:
        """Allocate 4-bit weights; each weight is quantized as it is loaded."""
        quantize_base(model.module)


class Lora(ModelPart):
    """LoRA adapters (`model.lora_rank`): only the adapters and a scalar head are trained."""

    def change(self, model: Model) -> None:
        """Add adapters to linear layers and freeze the other weights."""
        add_adapter(model.module, model.model_config)


class ExpertSpread(ModelPart):
    """Expert parallelism (`parallel.ep`): each rank has some experts, and tokens are sent to
    them.
    """

    def change(self, model: Model) -> None:
        """Keep only this rank's experts of every layer."""
        from workers.parallel.experts import spread_experts

        spread_experts(model.module, model.groups.ep_mesh)


class RouterReplay(ModelPart):
    """Router replay (`router_replay.mode=R3`): tokens go to the experts that the rollout chose."""

    routers: Routers

    def change(self, model: Model) -> None:
        """Find the routers of all layers."""
        self.routers = Routers(model.module)

    def computing(self) -> AbstractContextManager[None]:
        """Context in which routers choose the experts of the last feed."""
        return self.routers.replaying()

    def check_rows(self, columns: RowColumns) -> None:
        """Reject rows that name experts which the routers do not have."""
        if ROUTED in columns:
            self.routers.check(columns[ROUTED].values)

    def fed(self, feed: Feed) -> None:
        """Use the experts of this feed from now on."""
        self.routers.replay(feed.routed)


class MatrixSplit(ModelPart):
    """Tensor parallelism (`parallel.tp`): matrices are split over the ranks of an axis."""

    cut: ModuleSplit

    def change(self, model: Model) -> None:
        """Split the matrices."""
        from workers.parallel import tensor

        tensor.check_split(model.module, model.dims.tp, "parallel.tp")
        self.cut = tensor.split_module(model.module, model.groups.mesh["tp"])
        model.vocab = self.cut.vocab

    def sum_gradients(self) -> None:
        """Sum the gradients of weights that saw only some of the heads; once per step."""
        self.cut.add_up_gradients()
