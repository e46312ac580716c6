"""`python -m trainer.main_ppo key=value ...`: a PPO run, as `verl-like ppo` starts it."""

from __future__ import annotations

import sys

from trainer.ppo.help_text import HELP
from verl_like.terminal import fit, terminal_width


def main() -> None:
    """By the arguments of the process."""
    if {"-h", "--help"} & set(sys.argv[1:]):  # Hydra's own would take a second to import
        print(fit(HELP.rstrip(), terminal_width()))
        return

    from trainer.ppo.recipe import PPO
    from trainer.recipe_command import run_command

    run_command(PPO, sys.argv[1:])


if __name__ == "__main__":
    main()
