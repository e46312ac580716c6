"""Faults on purpose that could not come about in a run, refused before a device is taken."""

from __future__ import annotations

from trainer.config.schema import RunConfig
from verl_like.errors import ConfigError


def check_chaos(config: RunConfig) -> None:
    """Refuse to kill where nobody can die: a worker in the driver's own process takes the run
    with it.
    """
    if config.chaos.kill_worker == 0:
        return
    what, backend = f"chaos.kill_worker={config.chaos.kill_worker:g}", config.trainer.backend
    if backend == "torchrun":
        raise ConfigError(
            f"{what} with trainer.backend=torchrun: torchrun ends the whole run when one of its "
            "processes dies. Take trainer.backend=ray."
        )
    sizes = {name: sum(of_nodes) for name, of_nodes in config.resource_pool_spec.items()}
    if not any(config.has_own_processes(name, size) for name, size in sizes.items()):
        raise ConfigError(
            f"{what}: no worker of this run has a process of its own (trainer.backend={backend}, "
            f"pools of {', '.join(f'{name}: {size}' for name, size in sizes.items())}). Take "
            "trainer.backend=ray, or a pool of two processes."
        )
