"""PPO on declared placement of roles.

  verl-like ppo data.train_files=FILE actor_rollout_ref.model.path=FOLDER
                [key=value ...]        or python -m trainer.main_ppo, in a checkout

Placement    placement=colocate|split|standalone
             resource_pool_spec.critic_pool=[2]  processes per node, over the preset
             resource_pool_spec.my_pool=[1] role_mapping.rollout=my_pool  one's own
Devices      trainer.nnodes=1 trainer.n_gpus_per_node=4 trainer.device=cpu|cuda
Where        trainer.backend=ray|local  ray.address=HOST:PORT
Look first   trainer.dry_run=true prints the plan and the batch sizes
Several      --multirun trainer.seed=1,2   (a folder for each in the run folder)
Algorithm    algorithm=ppo|grpo|dapo|…      a paper's settings, below your keys
             algorithm.adv_estimator=gae|grpo  algorithm.use_kl_in_reward=true
             correction=decoupled_seq_is|bypass_ppo_clip|…  for older samples
Length       trainer.total_training_steps=100  trainer.total_epochs=1

Keys         verl-like ppo algorithm=grpo --cfg job    what this run reads
             verl-like ppo --cfg all                   every key there is
Completion   eval "$(verl-like -sc install=bash)"
A mistyped key is refused with the nearest ones.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from verl_like.terminal import fit, terminal_width


def main(arguments: Sequence[str] | None = None) -> None:
    """A run by these arguments, those of the process by default."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if {"-h", "--help"} & set(arguments):
        print(fit((__doc__ or "").rstrip(), terminal_width()))
        return

    from trainer.ppo.recipe import PPO
    from trainer.recipe_command import run_command

    run_command(PPO, arguments)


if __name__ == "__main__":
    main()
