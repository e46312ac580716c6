"""Faults on purpose that could not come about in a run, refused before a device is taken."""

from __future__ import annotations

from trainer.config.schema import RunConfig
from verl_like.errors import ConfigError
from verl_like.placement.roles import expand_roles


def check_chaos(config: RunConfig) -> None:
    """Refuse faults that nothing in this run could have."""
    chaos = config.chaos
    if chaos.kill_worker > 0:
        _check_somebody_can_die(config)
    if chaos.drop_bucket > 0:
        _check_weights_travel(config)


def _check_somebody_can_die(config: RunConfig) -> None:
    """A worker in the driver's own process would take the run with it."""
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


def _check_weights_travel(config: RunConfig) -> None:
    """A rollout in the actor's own processes is handed the weights: there are no buckets."""
    pools = expand_roles(config.role_mapping)
    receivers = [role for role in pools if role.startswith("rollout")]
    if "actor" not in pools or not any(pools[role] != pools["actor"] for role in receivers):
        raise ConfigError(
            f"chaos.drop_bucket={config.chaos.drop_bucket:g}: in this run no weights travel "
            "between processes. They do where a rollout has another pool than the actor: "
            "placement=standalone, or `verl-like detached`."
        )
