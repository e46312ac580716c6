"""Write what the docs say about keys, columns and algorithms: `python docs/make_tables.py`.

The tables stand between `<!-- begin … -->` and `<!-- end … -->` in `configuration.md`,
`rewards.md`, `dataflow.md`, `algorithms.md` and `updates.md`; a test checks that they are current.
An algorithm's row is its function's docstring (its last paragraphs are `Watch: …` and `Source: …`),
the names that it is registered by, and the columns and settings that its parameters ask for.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from trainer.cli.explain import field_docs
from trainer.config.keys import Key, config_keys, leaf_keys, read
from trainer.ppo.advantages.registry import ADVANTAGE_ESTIMATORS
from trainer.ppo.compute_advantage import SETTINGS, columns_read
from trainer.ppo.config import PPOConfig
from trainer.ppo.recipe import PPO
from workers.columns import COLUMNS
from workers.config import RewardConfig
from workers.losses.aggregate import AGGREGATIONS
from workers.losses.kl import KL_ESTIMATORS
from workers.losses.registry import POLICY_LOSSES, keys_read
from workers.losses.value import compute_huber_value_loss, compute_value_loss
from workers.training.schedules import LR_SCHEDULES

DOCS = Path(__file__).resolve().parent


def key_table() -> str:
    """A table for every section: key, default, values, when it is read, resume, meaning."""
    PPO.load_registries()
    docs, default = field_docs(), PPOConfig()
    keys = {key.name: key for key in config_keys(PPOConfig)}
    rows: dict[str, list[str]] = {}
    for key in keys.values():
        if not key.is_section:
            section, _, leaf = key.name.rpartition(".")
            rows.setdefault(section, []).append(_key_row(leaf, key, default, docs))

    parts = []
    for section, lines in rows.items():
        intro = _section_intro(keys[section], docs[section]) if section else "## Top level\n"
        parts.append("\n".join([intro, *HEAD_OF_KEYS, *lines]))
    return "\n\n".join(parts)


HEAD_OF_KEYS = (
    "| key | default | values | read when | resume | meaning |",
    "|---|---|---|---|---|---|",
)


def reward_key_table() -> str:
    """The keys of one item of the list `rewards`."""
    docs, default = field_docs(RewardConfig), RewardConfig()
    rows = [_key_row(key.name, key, default, docs) for key in leaf_keys(RewardConfig)]
    return "\n".join([*HEAD_OF_KEYS, *rows])


def _key_row(name: str, key: Key, default: Any, docs: Mapping[str, str]) -> str:
    cells = [f"`{name}`", _show(read(default, key.name)), *_rule_cells(key)]
    return f"| {' | '.join([*cells, _cell(docs[key.name]) + _name_in_verl(key)])} |"


def _section_intro(section: Key, doc: str) -> str:
    """Heading, docstring, and the rules that hold for all of its keys."""
    values, read_when, resume = _rule_cells(section)
    rules = f" Read when {read_when}." if read_when else ""
    rules += " A resumed run may change all of it." if resume else ""
    return f"## `{section.name}`\n\n{doc}{rules}\n"


def _rule_cells(key: Key) -> tuple[str, str, str]:
    """Values, when it is read, and whether a resumed run may change it."""
    read_when = " and ".join(condition.says for condition in key.rules.read_when)
    resume = "may change" if key.rules.may_change_on_resume else ""
    return _cell(key.allowed), _cell(read_when), resume


def _name_in_verl(key: Key) -> str:
    return f" In verl: `{key.rules.verl}`." if key.rules.verl else ""


def column_table() -> str:
    """The batch's columns."""
    rows = [
        f"| `{c.name}` | `{c.shape}` | {c.dtype} | {_cell(c.written_by)} |"
        for c in COLUMNS.values()
    ]
    return "\n".join(["| column | shape | type | written by |", "|---|---|---|---|", *rows])


def estimator_table() -> str:
    """The advantage estimators."""
    rows = []
    for names, estimator in _by_entry(ADVANTAGE_ESTIMATORS).items():
        parameters = inspect.signature(estimator).parameters
        keys = [f"algorithm.{SETTINGS[name]}" for name in parameters if name in SETTINGS]
        columns = columns_read(names[0])
        rows.append([_code(names), *_formula_and_source(estimator), _code(columns), _code(keys)])
    return _table(["name", "formula", "source", "columns it reads", "keys it reads"], rows)


def policy_loss_table() -> str:
    """The policy losses."""
    rows = []
    for names, policy_loss in _by_entry(POLICY_LOSSES).items():
        keys = keys_read(policy_loss)
        assert keys is not None, f"{names[0]} does not say which keys it reads: @reads(...)"
        rows.append([_code(names), *_formula_and_source(policy_loss), _code(keys)])
    return _table(["name", "formula", "source", "keys it reads, under `actor.`"], rows)


def value_loss_table() -> str:
    """The critic's losses."""
    losses = {
        "clipped": (compute_value_loss, "critic.cliprange_value"),
        "huber": (compute_huber_value_loss, "critic.huber_delta"),
    }
    rows = []
    for name, (loss, key) in losses.items():
        rows.append([_code([name]), *_formula_and_source(loss), _code([key])])
    return _table(["name", "formula", "source", "keys it reads"], rows)


def kl_table() -> str:
    """The KL estimators."""
    rows = []
    for names, estimate in _by_entry(KL_ESTIMATORS).items():
        rows.append([_code(names), *_formula_and_source(estimate)])
    return _table(["name", "formula", "source"], rows)


def aggregation_table() -> str:
    """The ways from token losses to one number."""
    rows = [[_code([name]), *about] for name, about in AGGREGATIONS.items()]
    return _table(["name", "formula", "source"], rows)


def lr_schedule_table() -> str:
    """The learning-rate schedules."""
    rows = []
    for names, schedule in _by_entry(LR_SCHEDULES).items():
        keys = list(inspect.signature(schedule).parameters)[1:]
        rows.append([_code(names), *_formula_and_source(schedule), _code(keys)])
    return _table(["name", "rate", "source", "keys it reads, under `optim.`"], rows)


def preset_table(group: str) -> str:
    """The presets of a group: what each file says of itself, and what it sets."""
    rows = []
    for preset in PPO.preset_names(group):
        text = (PPO.config_dir / group / f"{preset}.yaml").read_text(encoding="utf-8")
        about = [line.removeprefix("# ") for line in text.splitlines()[1:] if line.startswith("#")]
        keys = [f"{name}={value}" for name, value in _leaves(yaml.safe_load(text), "")]
        rows.append([_code([preset]), " ".join(about), _code(keys)])
    return _table(["preset", "what", "sets"], rows)


def _leaves(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Dotted keys and their values."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", str(value).lower() if isinstance(value, bool) else value


def _by_entry(registry: Mapping[str, Callable[..., Any]]) -> dict[tuple[str, ...], Any]:
    """(name, its aliases) -> entry."""
    names: dict[Callable[..., Any], list[str]] = {}
    for name, entry in registry.items():
        names.setdefault(entry, []).append(name)
    return {tuple(of_entry): entry for entry, of_entry in names.items()}


def _formula_and_source(algorithm: Callable[..., Any]) -> tuple[str, str]:
    text, _, source = inspect.cleandoc(algorithm.__doc__ or "").partition("\n\nSource: ")
    text = text.partition("\n\nWatch: ")[0]
    assert source, f"the docstring of {algorithm.__name__} ends without a paragraph `Source: …`"
    return text, source


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *([_cell(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _show(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "`null`" if value is None else f"`{str(value).lower()}`"
    value = list(value) if isinstance(value, tuple) else value
    return f"`{value}`" if value != "" else ""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


TABLES: dict[str, tuple[str, Callable[[], str]]] = {
    "keys": ("configuration.md", key_table),
    "rewards": ("rewards.md", reward_key_table),
    "columns": ("dataflow.md", column_table),
    "presets": ("algorithms.md", partial(preset_table, "algorithm")),
    "estimators": ("algorithms.md", estimator_table),
    "policy-losses": ("algorithms.md", policy_loss_table),
    "aggregations": ("algorithms.md", aggregation_table),
    "value-loss": ("algorithms.md", value_loss_table),
    "kl": ("algorithms.md", kl_table),
    "lr-schedules": ("updates.md", lr_schedule_table),
    "corrections": ("algorithms.md", partial(preset_table, "correction")),
}


def filled(name: str) -> tuple[Path, str]:
    """The page that holds the table `name`, with the table as it should be."""
    page, make = TABLES[name]
    path = DOCS / page
    block = f"<!-- begin {name} -->\n\n{make()}\n\n<!-- end {name} -->"
    text = re.sub(
        rf"<!-- begin {name} -->.*<!-- end {name} -->",
        lambda _: block,
        path.read_text("utf-8"),
        flags=re.S,
    )
    return path, text


def main() -> None:
    """Write every table."""
    for name in TABLES:
        path, text = filled(name)
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
