"""Check from its class, before a device is taken, which axes a model can be split over."""

from __future__ import annotations

from typing import Any

from verl_like.errors import ConfigError
from workers.config.model import ModelConfig
from workers.models.support.proof import Support
from workers.parallel import tensor
from workers.parallel.dims import ParallelDims
from workers.parallel.experts import check_experts
from workers.training.parts.compile import blocking_axis
from workers.training.parts.stage_check import check_stages
from workers.training.row_proof import NOT_ASKED, check_split


def check_axes(
    module: Any, config: ModelConfig, dims: ParallelDims, section: str, pp_schedule: str = "1f1b"
) -> None:
    """Reject axes that a model on the meta device does not support.

    `section` is the key of its `parallel` section, for messages.
    """
    attention = config.attn_implementation
    support = Support.of(module.config, "" if attention == "auto" else attention)
    if config.compile == "on" and (reason := blocking_axis(dims)):
        raise ConfigError(f"model.compile=on: {section}.{reason}; set model.compile=auto.")
    if dims.sp > 1:
        why_not = "" if config.use_remove_padding else NOT_ASKED
        check_split(support, dims.sp, why_not, section)
    if dims.pp > 1:
        check_stages(module, support, dims.pp, pp_schedule, dims.ep, section)
    if dims.tp > 1:
        tensor.check(module, dims.tp, f"{section}.tp")
    if dims.ep > 1:
        check_experts(module, dims.ep, dims.efsdp, f"{section}.ep")
