"""usage: verl-like best-of-n data.train_files=FILE
           actor_rollout_ref.model.path=FOLDER [key=value ...]

Samples actor_rollout_ref.rollout.n responses per prompt (rejection sampling), scores them with the
rewards of `verl-like ppo`, and saves the best ones for `verl-like sft`, or pairs of best and worst.
A killed run continues where it was.

  actor_rollout_ref.rollout.n=16  selection.top_k=2  selection.min_score=0.5
  selection.write=pairs             prompt, chosen, rejected
  selection.file=best.parquet       or .jsonl; by default selected.jsonl in the run folder
  verl-like best-of-n --cfg all     every key with its meaning
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainer.best_of_n.config import BestOfNConfig
from trainer.config.recipe import Recipe, presets
from trainer.ppo.recipe import NO_REWARD_MODEL, extra_roles
from verl_like.errors import ConfigError
from workers.config import model_rewards, plays


def inactive_roles(config: Any) -> dict[str, str]:
    """Return roles that this run does not need -> why."""
    if model_rewards(config):
        return {}
    return {"reward_model": NO_REWARD_MODEL}


def check(config: BestOfNConfig) -> None:
    """Check the rules between fields, which depend on the rewards and the engines."""
    from trainer.ppo.checks import check_quantized_device
    from trainer.rollouts.reward_checks import check_rewards
    from workers.rollout.sampling_settings import check_sampling

    check_rewards(config)
    check_quantized_device(config)
    rollout, selection = config.actor_rollout_ref.rollout, config.selection
    check_sampling(rollout, config.data.max_response_length)
    for number, reward in enumerate(config.rewards):
        if reward.normalize:
            raise ConfigError(
                f"rewards[{number}].normalize=true: scores are compared with selection.min_score "
                "and written down, so they must not depend on the batch. Set it to false."
            )

    if plays(config) and (selection.write == "pairs" or config.environment.tools):
        reason = "tools" if config.environment.tools else "selection.write=pairs"
        raise ConfigError(
            f"{reason}: a trajectory becomes a row of `messages` for verl-like sft, which has no "
            "tools, and no other side. Leave it out."
        )
    wanted = 2 if selection.write == "pairs" else selection.top_k
    if rollout.n < wanted:
        reason = (
            "a pair is made of two" if selection.write == "pairs" else f"top_k={wanted} are kept"
        )
        raise ConfigError(
            f"actor_rollout_ref.rollout.n={rollout.n} samples of a prompt, of which {reason}. Set "
            f"actor_rollout_ref.rollout.n to {wanted} or more."
        )
    if rollout.n > 1 and not rollout.do_sample:
        raise ConfigError(
            f"actor_rollout_ref.rollout.do_sample=false: all {rollout.n} samples of a prompt are "
            "its greedy answer. Set actor_rollout_ref.rollout.do_sample=true, or n=1."
        )
    if selection.file and Path(selection.file).suffix not in (".parquet", ".jsonl"):
        raise ConfigError(f"selection.file={selection.file}: it ends in .parquet or .jsonl.")


BEST_OF_N = Recipe(
    name="best-of-n",
    schema=BestOfNConfig,
    config_dir=Path(__file__).resolve().parent,
    config_name="best_of_n",
    placements=presets({"rollout_pool": ["rollout"], "reward_pool": ["reward_model"]}),
    inactive_roles=inactive_roles,
    extra_roles=extra_roles,
    checks=(check,),
)
