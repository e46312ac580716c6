"""The error of a run that needs GPUs where there are none."""

from __future__ import annotations

from trainer.config.schema import RunConfig
from verl_like.errors import PlacementError


def error_without_gpu(config: RunConfig, why: str) -> PlacementError:
    """Return the error for `device=cuda` without GPUs, which names the key."""
    pools = [
        pool for pool, resources in config.pool_resources.items() if resources.device == "cuda"
    ]
    in_all = config.trainer.device == "cuda"
    asks = "trainer.device" if in_all else f"pool_resources.{pools[0]}.device"
    return PlacementError(
        f"{asks}=cuda asks for GPUs, but {why}. Set {asks}=auto or cpu to run on CPU slots."
    )
