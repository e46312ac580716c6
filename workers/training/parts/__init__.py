"""Options of a model; each part is a file, and installs itself.

for part in parts: part.check(model)        # before there is a module
for part in parts: part.change(model)       # the empty module, in the order of `parts_of`
...                                         # the module is sharded and gets its weights
for part in parts: part.finish(model)
with part.computing(): part.fed(feed)       # around passes, and before each
"""

from __future__ import annotations

from workers.training.model import Model, Part


def parts_of(model: Model) -> list[Part]:
    """Return the parts of a model, in the order in which they change its empty module."""
    config, dims, settings = model.model_config, model.dims, model.settings
    parts: list[Part] = []
    if settings.quantization:
        from workers.training.parts.int8 import Int8

        parts.append(Int8())
    if settings.trains and config.lora_rank > 0:
        from workers.training.parts.lora import Lora

        parts.append(Lora())
    if dims.pp > 1:
        from workers.training.parts.pipeline import StagePlan

        parts.append(StagePlan())  # from whole weights
    if dims.tp > 1:
        from workers.training.parts.tensor import MatrixSplit

        parts.append(MatrixSplit())
    if dims.ep > 1:
        from workers.training.parts.experts import ExpertSpread

        parts.append(ExpertSpread())
    if settings.replays_routing:
        from workers.training.parts.router_replay import RouterReplay

        parts.append(RouterReplay())  # rows name experts of all stages
    if config.fp8_linear and not settings.quantization:
        from workers.training.parts.float8 import Float8

        parts.append(Float8())
    if config.compile == "on" or (config.compile == "auto" and model.device.type == "cuda"):
        from workers.training.parts.compile import Compile

        parts.append(Compile())
    if dims.pp > 1:
        from workers.training.parts.pipeline import StageSelection

        parts.append(StageSelection())
    if settings.router_aux_loss_coef:
        from workers.training.parts.load_balancing import LoadBalancing

        parts.append(LoadBalancing(settings.router_aux_loss_coef))
    return parts
