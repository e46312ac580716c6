"""`python -m trainer.main_ppo key=value ...`: Hydra's entry to a PPO run (`verl-like ppo` calls the same `main`)."""

from __future__ import annotations

import sys

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from trainer.compose import CONFIG_DIR, CONFIG_NAME, check_overrides, from_composed
from verl_like.errors import ConfigError, PlacementError


@hydra.main(config_path=str(CONFIG_DIR), config_name=CONFIG_NAME, version_base="1.3")
def _job(composed: DictConfig) -> None:
    try:
        config = from_composed(composed, HydraConfig.get().overrides.task)
    except (ConfigError, PlacementError) as err:
        sys.exit(f"error: {err}")
    from trainer.ppo import run

    run(config)


def main() -> None:
    """Check the overrides in `sys.argv`, then let Hydra compose, print (`--cfg job`, `--help`) or run."""
    arguments = sys.argv[1:]
    if not {"-sc", "--shell-completion"} & set(arguments):
        try:
            check_overrides([a for a in arguments if not a.startswith("-") and ("=" in a or a.startswith("~"))])
        except ConfigError as err:
            sys.exit(f"error: {err}")
    _job()


if __name__ == "__main__":
    main()
