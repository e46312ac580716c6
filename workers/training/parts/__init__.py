"""Optional features of a model (LoRA, int8, router replay, ...).

Each is a `ModelPart` that changes the module itself.

Example:

    for part in parts: part.check(model)        # before there is a module
    for part in parts: part.change(model)       # the empty module, in the order of `parts_of`
    ...                                         # the module is sharded and gets its weights
    for part in parts: part.finish(model)
    with part.computing(): part.fed(feed)       # around passes, and before each

`layers` has the small parts; the others have their own files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from verl_like.errors import ConfigError
from workers.models.support import Support
from workers.training.model import Model, ModelPart
from workers.training.parts.layers import NF4, ExpertSpread, Int8, Lora, MatrixSplit, RouterReplay
from workers.training.row_layout import PADDED_BY_USER, check_split

if TYPE_CHECKING:
    from workers.config.model import ModelConfig
    from workers.parallel.dims import ParallelDims


def parts_of(model: Model) -> list[ModelPart]:
    """Return the parts of a model, in the order in which they change its empty module."""
    config, dims, settings = model.model_config, model.dims, model.settings
    parts: list[ModelPart] = []
    if settings.quantization:
        parts.append(NF4() if settings.quantization == "nf4" else Int8())
    if settings.trains and config.lora_rank > 0:
        parts.append(Lora())
    if dims.pp > 1:
        from workers.training.parts.pipeline import StagePlan, StageSelection

        parts.append(StagePlan())  # from whole weights
    if dims.tp > 1:
        parts.append(MatrixSplit())
    if dims.ep > 1:
        parts.append(ExpertSpread())
    if settings.replays_routing:
        parts.append(RouterReplay())  # needs the layers of all stages
    compiles = model.device.type == "cuda" and settings.quantization != "nf4"
    if config.compile == "on" or (config.compile == "auto" and compiles):
        from workers.training.parts.compile import Compile

        parts.append(Compile())
    if dims.pp > 1:
        parts.append(StageSelection())
    if settings.router_aux_loss_coef:
        from workers.training.parts.load_balancing import LoadBalancing

        parts.append(LoadBalancing(settings.router_aux_loss_coef))
    return parts


def check_axes(
    module: Any, config: ModelConfig, dims: ParallelDims, section: str, pp_schedule: str = "1f1b"
) -> None:
    """Reject axes that a model on the meta device does not support, before a device is taken.

    `section` is the key of its `parallel` section, for messages.
    """
    attention = config.attn_implementation
    support = Support.of(module.config, "" if attention == "auto" else attention)
    if config.compile == "on":
        from workers.training.parts.compile import blocking_axis

        if reason := blocking_axis(dims):
            compile_key = f"{config.SECTION}.compile"
            raise ConfigError(f"{compile_key}=on: {section}.{reason}. Set {compile_key}=auto.")
    if dims.sp > 1:
        check_split(support, dims.sp, "" if config.use_remove_padding else PADDED_BY_USER, section)
    if dims.pp > 1:
        from workers.training.parts.pipeline import check_stages

        check_stages(module, support, dims.pp, pp_schedule, dims.ep, section)
    if dims.tp > 1:
        from workers.parallel import tensor

        tensor.check(module, dims.tp, f"{section}.tp")
    if dims.ep > 1:
        from workers.parallel.experts import check_experts

        check_experts(module, dims.ep, dims.efsdp, f"{section}.ep")
