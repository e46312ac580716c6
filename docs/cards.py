"""Read the card of an algorithm from its file, and the keys of a preset.

A docstring is the formula in words, then a paragraph `Watch: …` (the metric that shows that it goes
wrong, and what then), then `Source: …`. Columns and keys come from the signature and `@reads`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from omegaconf import OmegaConf

from trainer.cli.check import doc_parts
from trainer.ppo.advantage_inputs import SETTINGS, columns_read
from trainer.ppo.advantages.registry import ADVANTAGE_ESTIMATORS, needs_groups
from trainer.ppo.recipe import PPO
from verl_like.config_key import settable_arguments
from workers.losses.registry import POLICY_LOSSES, traits_of

ACTOR = "actor_rollout_ref.actor."
LOSS_MODE = f"{ACTOR}policy_loss.loss_mode"
OF_THE_LOSS = tuple(f"{ACTOR}{name}" for name in ("clip_ratio", "loss_agg_mode", "ppo_mini_batch"))
"""Prefix of the keys that a preset sets for its policy loss, in addition to its name."""
GROUP_OF_EIGHT = "actor_rollout_ref.rollout.n=8"
ONE_NAMED_REWARD = "algorithm.gdpo_reward_keys=[seq_reward]"


class Card(NamedTuple):
    """An algorithm: an estimator or a policy loss."""

    names: tuple[str, ...]
    """The name that it is registered by, then its aliases."""
    formula: str
    watch: str
    """The metric that shows a failure, and what to do; "" if there is none."""
    source: str
    """The paper; "" if none is known."""
    columns: tuple[str, ...]
    """Columns of the batch."""
    keys: tuple[str, ...]
    """Dotted keys of the configuration."""
    settings: tuple[str, ...]
    """An example: what a command sets to train with it."""


def estimator_cards() -> list[Card]:
    """The advantage estimators, by name."""
    cards = []
    for names, estimator in names_by_entry(ADVANTAGE_ESTIMATORS).items():
        parameters = inspect.signature(estimator).parameters
        keys = tuple(f"algorithm.{SETTINGS[name]}" for name in parameters if name in SETTINGS)
        example = [f"algorithm.adv_estimator={names[0]}"]
        if needs_groups(estimator):
            example.append(GROUP_OF_EIGHT)
        if "named_rewards" in parameters:
            example.append(ONE_NAMED_REWARD)
        cards.append(
            Card(names, *doc_parts(estimator), columns_read(names[0]), keys, tuple(example))
        )
    return cards


def policy_loss_cards() -> list[Card]:
    """The policy losses, by name."""
    cards = []
    for names, policy_loss in names_by_entry(POLICY_LOSSES).items():
        traits = traits_of(policy_loss)
        chosen = ("chosen_tokens",) if traits.choose_tokens else ()
        columns = ("old_log_probs", "advantages", "response_mask", *chosen)
        arguments = [f"policy_loss.args.{name}" for name in settable_arguments(policy_loss)]
        read = (*(traits.keys_read or ()), *arguments, "loss_agg_mode")
        keys = tuple(f"{ACTOR}{name}" for name in read)
        cards.append(
            Card(names, *doc_parts(policy_loss), columns, keys, _example_of_loss(names[0]))
        )
    return cards


def _example_of_loss(name: str) -> tuple[str, ...]:
    """GRPO's advantages, with the clip and aggregation of the first preset that has this loss."""
    settings = [f"{LOSS_MODE}={name}", "algorithm.adv_estimator=grpo", GROUP_OF_EIGHT]
    if name == "vanilla":
        return tuple(settings)

    for preset in PPO.preset_names("algorithm"):
        leaves = preset_leaves("algorithm", preset)
        if leaves.get(LOSS_MODE) == name:
            settings += [f"{key}={leaves[key]}" for key in leaves if key.startswith(OF_THE_LOSS)]
            break
    return tuple(settings)


def names_by_entry(registry: Mapping[str, Callable[..., Any]]) -> dict[tuple[str, ...], Any]:
    """(name, its aliases) -> entry."""
    names: dict[Callable[..., Any], list[str]] = {}
    for name, entry in registry.items():
        names.setdefault(entry, []).append(name)
    return {tuple(of_entry): entry for entry, of_entry in names.items()}


def preset_text(group: str, preset: str) -> str:
    """The file of a preset, such as `algorithm=grpo`."""
    return (PPO.config_dir / group / f"{preset}.yaml").read_text(encoding="utf-8")


@functools.cache
def preset_leaves(group: str, preset: str) -> dict[str, Any]:
    """The dotted keys that a preset sets, with their values, in the order of its lines."""
    tree = OmegaConf.to_container(OmegaConf.create(preset_text(group, preset)))
    assert isinstance(tree, dict), f"{group}/{preset}.yaml is no mapping"
    return dict(_leaves(tree, ""))


def left_to_the_user(group: str, preset: str) -> list[str]:
    """The dotted keys that a preset names and that the user has to set: `${required:...}`."""
    leaves = preset_leaves(group, preset).items()
    return [key for key, value in leaves if str(value).startswith("${required:")]


def _leaves(tree: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def correction_table() -> str:
    """The presets of `correction`: a row per loss and weights, a column per rejection."""
    cells = {}
    for name in PPO.preset_names("correction"):
        keys = preset_leaves("correction", name)
        mode = "bypass" if keys.get("bypass_mode") else "decoupled"
        loss = f"{mode} {'REINFORCE' if keys.get('loss_type') == 'reinforce' else 'PPO'}"
        level, bounds = keys.get("rollout_is"), keys.get("rollout_is_threshold", "")
        low, _, high = bounds.replace(".0", "").partition("_")
        outside = f"0 outside {low} to {high} (IcePop)" if high else f"at most {low}"
        weights = f"per {level}, {outside}" if level else "none"
        rejection = " ".join((keys.get("rollout_rs") or "", keys.get("rollout_rs_threshold", "")))
        cells[loss, weights, rejection.strip()] = name
    rejections = sorted({rejection for *_, rejection in cells})
    heads = [REJECTIONS[rejection] for rejection in rejections]
    lines = ["|".join(["Loss", "Weights", *heads]), "|".join(["---"] * (2 + len(heads)))]
    for loss, weights in sorted({(loss, weights) for loss, weights, _ in cells}, reverse=True):
        names = [cells.get((loss, weights, rejection)) for rejection in rejections]
        lines.append("|".join([loss, weights, *(f"`{name}`" if name else "" for name in names)]))
    return "\n".join(lines)


REJECTIONS = {
    "": "No rejection",
    "seq_mean_k1 0.999_1.001": "Geometric mean outside 0.999 to 1.001",
    "seq_mean_k3 0.01": "Mean k3 above 0.01",
    "seq_sum_k1 0.5_2.0": "Product outside 0.5 to 2",
}
"""`rollout_rs` and its threshold -> which sequences it rejects."""
