"""`python -m trainer.main_ppo key=value ...`: a PPO run, as `verl-like ppo` starts it."""

from __future__ import annotations

import sys

from trainer.ppo.recipe import PPO
from trainer.recipe_command import run_command


def main() -> None:
    """By the arguments of the process."""
    run_command(PPO, sys.argv[1:])


if __name__ == "__main__":
    main()
