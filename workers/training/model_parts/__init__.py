"""Optional features of a model (LoRA, int8, router replay, ...).

Each is a `ModelPart` that changes the module itself; its docstring shows the order of the calls.
`layers` has the small parts; the others have their own files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from verl_like.errors import ConfigError
from verl_like.registry import load_object
from workers.models.support import Support
from workers.training.passes.row_layout import PADDED_BY_USER, check_split
from workers.training.sharded_model import Model, ModelPart

if TYPE_CHECKING:
    from workers.config.model import ModelConfig
    from workers.parallel.sharding import ParallelDims


PARTS: Mapping[str, Callable[[Model], bool]] = {
    "layers.NF4": lambda model: model.spec.quantization == "nf4",
    "layers.Int8": lambda model: model.spec.quantization == "int8",
    "layers.Lora": lambda model: model.spec.trains and model.model_config.lora_rank > 0,
    "pipeline.StagePlan": lambda model: model.dims.pp > 1,  # from whole weights
    "layers.MatrixSplit": lambda model: model.dims.tp > 1,
    "layers.ExpertSpread": lambda model: model.dims.ep > 1,
    "layers.RouterReplay": lambda model: model.spec.replays_routing,  # of all stages
    "compile.Compile": lambda model: compiles(model),
    "pipeline.StageSelection": lambda model: model.dims.pp > 1,
    "load_balancing.LoadBalancing": lambda model: model.spec.router_aux_loss_coef > 0,
}
"""Class in this folder -> whether a model has the part, in the order of their changes."""


def load_parts(model: Model) -> list[ModelPart]:
    """Return the parts of a model, in the order in which they change its empty module."""
    paths = [f"{__name__}.{name}" for name, is_part in PARTS.items() if is_part(model)]
    return [load_object(path, "part")() for path in paths]


def compiles(model: Model) -> bool:
    """Return whether the layers of a model are compiled."""
    config, on_gpu = model.model_config, model.device.type == "cuda"
    if config.compile == "auto":
        return on_gpu and model.spec.quantization != "nf4"
    return config.compile == "on"


def check_axes(
    module: Any, config: ModelConfig, dims: ParallelDims, section: str, pp_schedule: str = "1f1b"
) -> None:
    """Reject axes that a model on the meta device does not support, before a device is taken.

    `section` is the key of its `parallel` section, for messages.
    """
    attention = config.attn_implementation
    support = Support.of(module.config, "" if attention == "auto" else attention)
    if config.compile == "on":
        from workers.training.model_parts.compile import blocking_axis

        if reason := blocking_axis(dims):
            compile_key = f"{config.SECTION}.compile"
            raise ConfigError(f"{compile_key}=on: {section}.{reason}. Set {compile_key}=auto.")
    if dims.sp > 1:
        check_split(support, dims.sp, "" if config.use_remove_padding else PADDED_BY_USER, section)
    if dims.pp > 1:
        from workers.training.model_parts.pipeline import check_stages

        check_stages(module, support, dims.pp, pp_schedule, dims.ep, section)
    if dims.tp > 1:
        from workers.parallel import tensor

        tensor.check_split(module, dims.tp, f"{section}.tp")
    if dims.ep > 1:
        from workers.parallel.experts import check_experts

        check_experts(module, dims.ep, dims.efsdp, f"{section}.ep")
