"""Which axes a model can be laid over: seen from its configuration, before a device is taken."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workers.models.causal_lm import body_of
from workers.models.memory_shapes import meta_model
from workers.models.proof import attention_of
from workers.parallel import tensor
from workers.parallel.experts import check_experts
from workers.parallel.sharding import dims_of
from workers.training.row_proof import NOT_ASKED, refuse_split

if TYPE_CHECKING:
    from workers.memory import HeldModel


def check_axes(held: HeldModel, num_ranks: int) -> None:
    """Refuse axes that the model of a role cannot have on so many ranks, in words with sizes."""
    dims = dims_of(num_ranks, held.sharding)
    module = meta_model(held.model, held.head)
    if dims.sp > 1:
        attention = held.model.attn_implementation
        if attention == "auto":
            attention = body_of(module).config.get_text_config()._attn_implementation
        why_not = "" if held.model.use_remove_padding else NOT_ASKED
        refuse_split(module.config, attention_of(attention), dims.sp, why_not)
    if dims.tp > 1:
        tensor.check(module, dims.tp, f"{held.axes_key}.tp")
    if dims.ep > 1:
        check_experts(module, dims.ep, dims.efsdp, f"{held.axes_key}.ep")
