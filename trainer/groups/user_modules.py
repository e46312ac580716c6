"""Which of the user's modules the workers on other nodes need, so that Ray brings them there.

`trainer.groups.worker_groups` asks.

What a run names by a dotted path is imported in the worker processes: worker classes, policy
losses, optimizers. Estimators, reward functions and trainers run beside the driver and stay there.
"""

from __future__ import annotations

import importlib.util
import sysconfig
from pathlib import Path

from trainer.ppo.config import PPOConfig

OWN = ("verl_like", "workers", "trainer")


def modules_of_the_user(config: PPOConfig) -> list[str]:
    """Files and folders, each once, that hold the user's code for workers; what is installed is not
    among them.
    """
    actor = config.actor_rollout_ref.actor
    named = [*config.role_workers.values(), actor.policy_loss.loss_mode, actor.optim.optimizer]
    tops = dict.fromkeys(path.partition(".")[0] for path in named if "." in path)
    homes = (home_of(top) for top in tops if top not in OWN)
    return [str(home) for home in homes if home is not None]


def home_of(module: str) -> Path | None:
    """The file of a module or the folder of a package, None if it is installed or not there."""
    spec = importlib.util.find_spec(module)
    if spec is None:
        return None
    folders = list(spec.submodule_search_locations or ())
    home = Path(folders[0] if folders else str(spec.origin)).resolve()
    installed = [
        Path(sysconfig.get_path(kind)).resolve() for kind in ("purelib", "platlib", "stdlib")
    ]
    return None if any(home.is_relative_to(place) for place in installed) else home
