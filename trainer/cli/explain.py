"""`verl-like explain key=value ...`: what a step of a configuration will do, in words.

The graph comes from the trainer's class, the sizes from `trainer.ppo.sizes`, the keys without
effect from `trainer.config.unused_keys`. Nothing is started.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from trainer.config.keys import config_keys, leaf_keys, read
from trainer.config.unused_keys import unused_keys, why_unused
from trainer.launch import nominal_placement, trainer_class
from trainer.ppo.cards import estimator_cards, policy_loss_cards
from trainer.ppo.config import PPOConfig
from trainer.ppo.dataflow import describe, own_stages
from trainer.ppo.memory import plan_text
from trainer.ppo.recipe import load_config
from trainer.ppo.sizes import batch_table
from trainer.ppo.step import PPOTrainer
from verl_like.errors import ConfigError
from verl_like.placement.roles import expand_roles
from verl_like.terminal import fit, terminal_width

SHOWN_AS_PLACEMENT = ("resource_pool_spec", "role_mapping")
WIDTH_OF_A_FILE = 160


def explain(
    config: PPOConfig, max_columns: int | None = None, card_bytes: int | None = None
) -> str:
    """Everything, section by section, with tables no wider than `max_columns`.

    `card_bytes` is the memory of GPUs that this machine need not have.
    """
    card = "cuda" if card_bytes is not None else None
    own = own_stages(trainer_class(config), PPOTrainer)
    sections = {
        "What a step does": describe(config, max_columns, own).splitlines(),
        "Who runs where": placement_lines(config, max_columns),
        "How much": batch_table(config, max_columns).splitlines(),
        "On a device": plan_text(config, max_columns, card, card_bytes).splitlines(),
        "What to watch": watch_lines(config),
        "Changed from the defaults": change_lines(config),
        "No effect in this run": [
            f"{', '.join(keys)}: {reason}" for reason, keys in unused_keys(config).items()
        ],
    }
    return "\n\n".join(
        "\n".join([title, "-" * len(title), *(lines or ["nothing"])])
        for title, lines in sections.items()
    )


def placement_lines(config: PPOConfig, max_columns: int | None = None) -> list[str]:
    """The placement on the nodes that the configuration names, and what follows from it."""
    num_roles = Counter(expand_roles(config.role_mapping).values())
    shared = [pool for pool, count in num_roles.items() if count > 1]

    lines = nominal_placement(config).draw(max_columns).splitlines()
    if len(config.resource_pool_spec) > 1:
        lines.append("calls on different pools run at the same time")
    else:
        lines.append(
            "there is one pool, so nothing overlaps but rewards: placement=split gives the "
            "critic its own"
        )
    return lines + [f"roles on {pool} share its processes and take turns" for pool in shared]


def watch_lines(config: PPOConfig) -> list[str]:
    """The metrics that show whether estimator and policy loss do well; none of the user's own."""
    loss_mode = config.actor_rollout_ref.actor.policy_loss.loss_mode
    lines = []
    chosen = [(loss_mode, policy_loss_cards())]
    if why_unused(config, "algorithm.adv_estimator") is None:
        chosen.insert(0, (config.algorithm.adv_estimator, estimator_cards()))
    for name, cards in chosen:
        watch = [card.watch for card in cards if name in card.names]
        lines += [f"{name}: {' '.join(text.split())}" for text in watch]
    return lines


def change_lines(config: PPOConfig) -> list[str]:
    """Key, value, default and meaning of every key that is not at its default."""
    default, docs = PPOConfig(), field_docs()
    lines = []
    for key in (key.name for key in leaf_keys(type(config))):
        if key in SHOWN_AS_PLACEMENT:
            continue
        value, usual = (
            list(v) if isinstance(v, tuple) else v for v in (read(config, key), read(default, key))
        )
        if value != usual:
            meaning = " ".join(docs[key].split())  # the field's docstring may have several lines
            lines.append(f"{key}={_show(value)} (default {_show(usual)}): {meaning}")
    return lines


def _show(value: Any) -> str:
    return (
        "null"
        if value is None
        else str(value).lower()
        if isinstance(value, bool)
        else str(value) or "empty"
    )


def field_docs(schema: type = PPOConfig, prefix: str = "") -> dict[str, str]:
    """Dotted key -> the docstring under its field."""
    docs: dict[str, str] = {}
    for cls in reversed(schema.__mro__[:-1]):
        body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
        assert isinstance(body, ast.ClassDef), f"{cls} is a class"
        docs |= {prefix + name: text for name, text in _documented(body.body)}
    for key in config_keys(schema):
        if key.is_section and "." not in key.name:
            docs |= field_docs(key.kind, f"{prefix}{key.name}.")
    return docs


def _documented(statements: Sequence[ast.stmt]) -> Iterator[tuple[str, str]]:
    """(field, docstring) of the annotated assignments that a string follows."""
    for field, after in zip(statements, statements[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(after, ast.Expr)
        ):
            yield field.target.id, inspect.cleandoc(ast.literal_eval(after.value))


CARD = "--card-gb="


def main(arguments: Sequence[str]) -> None:
    """Print the explanation, wrapped to the terminal; of GPUs with `--card-gb` GiB, where given."""
    width = terminal_width() or WIDTH_OF_A_FILE
    cards = [argument.removeprefix(CARD) for argument in arguments if argument.startswith(CARD)]
    overrides = [argument for argument in arguments if not argument.startswith(CARD)]
    card_bytes = None
    if cards:
        try:
            card_bytes = int(float(cards[-1]) * 2**30)
        except ValueError as error:
            raise ConfigError(f"{CARD}{cards[-1]}: give a card's memory in GiB, as 80.") from error
    print(fit(explain(load_config(overrides), width, card_bytes), width))
