"""`python -m trainer.main_ppo key=value ...`: a PPO run, as `verl-like ppo` starts it."""

from __future__ import annotations

import sys

from trainer.ppo import recipe
from trainer.recipe_command import run_command


def main() -> None:
    """Run the command with the arguments of the process."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        print((recipe.__doc__ or "").rstrip())
    else:
        run_command(recipe.PPO, sys.argv[1:])


if __name__ == "__main__":
    main()
