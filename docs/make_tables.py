"""Write what the docs say about keys, columns and algorithms: `python docs/make_tables.py`.

The tables stand between `<!-- begin … -->` and `<!-- end … -->` in the pages that `TABLES` names; a
test checks that they are current. An algorithm's row and card are what its file says of itself
(`docs/cards.py`), its curve is what `docs/make_curves.py` has measured.
"""

from __future__ import annotations

import inspect
import itertools
import json
import operator
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from cards import (
    Card,
    estimator_cards,
    left_to_the_user,
    names_by_entry,
    policy_loss_cards,
    preset_leaves,
    preset_text,
)

from trainer.api.flat_names import OF_PPO, OF_ROWS
from trainer.cli.explain import field_docs, said_of
from trainer.config.keys import Key, config_keys, leaf_keys, read
from trainer.config.recipe import Recipe
from trainer.config.schema import RunConfig
from trainer.detached.recipe import DETACHED
from trainer.migrate import verl
from trainer.migrate.systems import migrate
from trainer.migrate.table import doc_rows
from trainer.ppo.config import PPOConfig
from trainer.ppo.recipe import PPO
from trainer.preference.recipe import DPO, PreferenceConfig
from trainer.reward_model.recipe import REWARD_MODEL
from trainer.rows.config import RowConfig
from trainer.sft.recipe import SFT
from workers.columns import COLUMNS
from workers.config import KL_ESTIMATORS as KL_NAMES
from workers.config import LOSS_AGG_MODES, RewardConfig
from workers.losses.aggregate import AGGREGATIONS
from workers.losses.kl import KL_ESTIMATORS
from workers.losses.preference.registry import COLUMNS as LOSS_COLUMNS
from workers.losses.preference.registry import PREFERENCE_LOSSES, parameters_of
from workers.losses.value import compute_huber_value_loss, compute_value_loss
from workers.roles.teacher import TeacherWorker  # noqa: F401 - says what column it writes
from workers.training.schedules import LR_SCHEDULES

DOCS = Path(__file__).resolve().parent
LOSS_AGG_MODE = "actor_rollout_ref.actor.loss_agg_mode"


def key_table() -> str:
    """A table for every section; a section like one above it refers to that."""
    PPO.load_registries()
    docs, default = field_docs(), PPOConfig()
    keys = {key.name: key for key in config_keys(PPOConfig)}
    rows: dict[str, list[str]] = {}
    for key in keys.values():
        if not key.is_section:
            section, _, leaf = key.name.rpartition(".")
            rows.setdefault(section, []).append(_key_row(leaf, key, default, docs))

    parts, seen = [], dict[str, str]()
    for section, lines in rows.items():
        intro = _section_intro(keys[section], docs[section]) if section else "### Top level\n"
        first = seen.setdefault("\n".join(lines), section)
        table = "\n".join([*HEAD_OF_KEYS, *lines])
        parts.append(f"{intro}\n{table if first == section else f'Keys of `{first}`.'}")
    return "\n\n".join(parts)


def recipe_key_table(recipe: Recipe[Any], base: type[RunConfig]) -> str:
    """The keys that a recipe has beside those of the schema `base`."""
    recipe.load_registries()
    docs, default = field_docs(recipe.schema), recipe.schema()
    of_base = {key.name for key in leaf_keys(base)}
    own = [key for key in leaf_keys(recipe.schema) if key.name not in of_base]
    return "\n".join([*HEAD_OF_KEYS, *(_key_row(key.name, key, default, docs) for key in own)])


HEAD_OF_KEYS = ("| key | default | values | meaning |", "|---|---|---|---|")
LISTED_ELSEWHERE = {
    KL_NAMES: "a [KL estimator](algorithms.md#kl-estimators)",
    "advantage estimator": "an [estimator](algorithms.md#advantage-estimators), or a dotted path",
    "policy loss": "a [policy loss](algorithms.md#policy-losses), or a dotted path",
    LOSS_AGG_MODES: "an [aggregation](algorithms.md#aggregation)",
}
"""Choices, or the registry that has them -> the link to their table."""


def reward_key_table() -> str:
    """The keys of one item of the list `rewards`."""
    docs, default = field_docs(RewardConfig), RewardConfig()
    rows = [_key_row(key.name, key, default, docs) for key in leaf_keys(RewardConfig)]
    return "\n".join([*HEAD_OF_KEYS, *rows])


def preference_key_table() -> str:
    """The keys that preference training has beside those of every recipe on rows."""
    DPO.load_registries()
    docs, default = field_docs(PreferenceConfig), PreferenceConfig()
    shared = {key.name for key in config_keys(RowConfig)}
    rows = []
    for key in config_keys(PreferenceConfig):
        if not key.is_section and key.name not in shared:
            rows.append(_key_row(key.name, key, default, docs))
    return "\n".join([*HEAD_OF_KEYS, *rows])


def _key_row(name: str, key: Key, default: Any, docs: Mapping[str, str]) -> str:
    resume = "↻" if key.rules.may_change_on_resume else ""
    value = read(default, key.name)
    meaning = f"{_cell(docs[key.name])}{_read_when(key)}"
    cells = [f"`{name}`{resume}", _show(value), _values(key, value), meaning]
    return f"| {' | '.join(cells)} |"


def _section_intro(section: Key, doc: str) -> str:
    """Heading, docstring, and the rules that hold for all of its keys."""
    resume = "↻" if section.rules.may_change_on_resume else ""
    return f"### `{section.name}`{resume}\n\n{doc}{_read_when(section)}\n"


SIGNS = (
    (r"\babove (-?[\d.]+)", r">\1"),
    (r"(-?[\d.]+) or (above|more)", r"≥\1"),
    (r"from ([\d.]+) to ([\d.]+)", r"\1…\2"),
    (r" and at most ([\d.]+)", r", ≤\1"),
    (r" and below ([\d.]+)", r", <\1"),
)
"""Words of a range -> the same in signs."""


def _values(key: Key, default: Any) -> str:
    """What it may be; the two values of a switch, and null as a default, go without saying."""
    listed = LISTED_ELSEWHERE.get(key.rules.registry or key.rules.choices)
    words = listed or _cell(key.allowed).removesuffix(", or null")
    for in_words, in_signs in SIGNS:
        words = re.sub(in_words, in_signs, words) if key.range else words
    if key.is_optional and default is not None and "null" not in words:
        words = f"{words}, or null"
    return "" if isinstance(default, bool) else words


def _read_when(key: Key) -> str:
    conditions = " and ".join(condition.says for condition in key.rules.read_when)
    return f" *When {_cell(conditions)}.*" if conditions else ""


def column_table() -> str:
    """The batch's columns."""
    rows = [
        f"| `{c.name}` | `{c.shape}` | {c.dtype} | {_cell(c.written_by)} |"
        for c in COLUMNS.values()
    ]
    return "\n".join(["| column | shape | type | written by |", "|---|---|---|---|", *rows])


def estimator_table() -> str:
    """The advantage estimators."""
    return _algorithm_table("estimator", estimator_cards())


def policy_loss_table() -> str:
    """The policy losses."""
    return _algorithm_table("policy_loss", policy_loss_cards())


def _algorithm_table(kind: str, cards: list[Card]) -> str:
    """Names, formula in short and score; the rest is on the card."""
    rows = []
    for card in cards:
        others = [f"`{name}`" for name in card.names[1:]]
        names = ", ".join([_link_to_card(kind, card.names[0]), *others])
        in_short = card.formula.partition("\n\n")[0]
        rows.append([names, in_short, _score_in_short(kind, card.names[0])])
    return _table(["name", "in short", "score"], rows)


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


def preference_loss_table() -> str:
    """The losses of preference training."""
    rows = []
    for name, loss in PREFERENCE_LOSSES.items():
        keys = [parameter for parameter in parameters_of(loss) if parameter not in LOSS_COLUMNS]
        rows.append([_code([name]), *_formula_and_source(loss), _code(keys)])
    return _table(["`loss=`", "formula", "source", "keys it reads"], rows)


def kl_table() -> str:
    """The KL estimators."""
    rows = []
    for names, estimate in names_by_entry(KL_ESTIMATORS).items():
        rows.append([_code(names), *_formula_and_source(estimate)])
    return _table(["name", "formula", "source"], rows)


def aggregation_table() -> str:
    """The ways from token losses to one number."""
    rows = [[_code([name]), *about] for name, about in AGGREGATIONS.items()]
    return _table(["name", "formula", "source"], rows)


def lr_schedule_table() -> str:
    """The learning-rate schedules."""
    rows = []
    for names, schedule in names_by_entry(LR_SCHEDULES).items():
        keys = list(inspect.signature(schedule).parameters)[1:]
        rows.append([_code(names), *_formula_and_source(schedule), _code(keys)])
    return _table(["name", "rate", "source", "keys it reads, under `optim.`"], rows)


def correction_table() -> str:
    """The presets of `correction`, and what each sets."""
    rows = []
    for preset in PPO.preset_names("correction"):
        leaves = preset_leaves("correction", preset).items()
        keys = [f"{name}={_show(value).strip('`')}" for name, value in leaves]
        rows.append([_code([preset]), _code(keys)])
    return _table(["preset", "sets"], rows)


def preset_table() -> str:
    """The presets of `algorithm`: what each file says of itself."""
    rows = []
    for preset in PPO.preset_names("algorithm"):
        link = _link_to_card("algorithm", preset)
        rows.append([link, _about_preset(preset), _score_in_short("algorithm", preset)])
    return _table(["preset", "what", "score"], rows)


def _about_preset(preset: str) -> str:
    """The comment at the head of its file."""
    lines = preset_text("algorithm", preset).splitlines()[1:]
    return " ".join(line.removeprefix("# ") for line in lines if line.startswith("#"))


def preset_card_list() -> str:
    """A card for each preset: its file, which says what it is and where its paper sets a key."""
    parts = []
    for preset in PPO.preset_names("algorithm"):
        text = preset_text("algorithm", preset).partition("\n")[2].rstrip()
        parts.append(_card("algorithm", preset, [f"```yaml\n{text}\n```"]))
    return "\n\n".join(parts)


def estimator_card_list() -> str:
    """A card for each advantage estimator."""
    return "\n\n".join(_algorithm_card("estimator", card) for card in estimator_cards())


def policy_loss_card_list() -> str:
    """A card for each policy loss."""
    return "\n\n".join(_algorithm_card("policy_loss", card) for card in policy_loss_cards())


def _algorithm_card(kind: str, card: Card) -> str:
    read = [name for name in (*card.columns, *card.keys) if name not in READ_BY_ALL[kind]]
    facts = [
        f"- **Source:** {' '.join(card.source.split())}",
        f"- **Reads:** {_code(read) or 'nothing else'}",
        f"- **Watch:** {' '.join(card.watch.split())}",
        f"- **Example:** `{shlex.join(card.settings)}`",
    ]
    if card.names[1:]:
        facts.insert(0, f"- **Also called:** {_code(card.names[1:])}")
    return _card(kind, card.names[0], [card.formula, "\n".join(facts)])


READ_BY_ALL = {
    "estimator": ("response_mask",),
    "policy_loss": ("response_mask", "old_log_probs", "advantages", LOSS_AGG_MODE),
}
"""What the page names once."""


def _card(kind: str, name: str, about: list[str]) -> str:
    """Heading, what there is to say, the learning curve."""
    return "\n\n".join([f"### {HEADINGS[kind]} `{name}`", *about, _curve(kind, name)])


HEADINGS = {"algorithm": "Preset", "estimator": "Estimator", "policy_loss": "Loss"}


def _link_to_card(kind: str, name: str) -> str:
    return f"[`{name}`](cards.md#{HEADINGS[kind].lower()}-{name})"


def _scores(kind: str, name: str) -> tuple[float, float] | None:
    """The mean score of the first and the last five steps of its run on the tiny task."""
    curves = json.loads((DOCS / "data" / "curves.json").read_text("utf-8"))
    scores = curves.get(f"{kind}/{name}")
    return scores and (sum(scores[:5]) / 5, sum(scores[-5:]) / 5)


def _score_in_short(kind: str, name: str) -> str:
    scores = _scores(kind, name)
    return f"{scores[0]:.2f} → {scores[1]:.2f}" if scores else ""


def _curve(kind: str, name: str) -> str:
    if kind == "algorithm" and left_to_the_user(kind, name):
        return "No curve: the tiny task has no such model."
    if _scores(kind, name) is None:
        return f"No curve yet: `python docs/make_curves.py --only {name}`."
    return f"![Score {_score_in_short(kind, name)}](images/curves/{kind}-{name}.png)"


def _formula_and_source(algorithm: Callable[..., Any]) -> tuple[str, str]:
    formula, _, source = said_of(algorithm)
    assert source, f"the docstring of {algorithm.__name__} has no paragraph `Source: …`"
    return formula, source


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


def flat_name_table() -> str:
    """What the flat names of runs from Python stand for."""
    rows = []
    for name in OF_PPO | OF_ROWS:
        keys = [names.get(name, "") for names in (OF_PPO, OF_ROWS)]
        rows.append([_code([name]), *(_code([key]) if key else "" for key in keys)])
    return _table(["name", "`PPO`, `GRPO`, `Detached`", "`SFT`, `RewardModel`, `DPO`"], rows)


KINDS_OF_MIGRATION = {
    "translated": ("there", "here"),
    "not needed": ("there", "why it is not needed"),
    "dropped": ("there", "what is lost, or what to do; the experiment is the same"),
    "refused": ("there", "why it is refused, or what to do"),
}
MIGRATED = (
    (r"(?:always|changes nothing): (.*)", "not needed", r"\1"),
    (r"changes nothing at (.*); else not here: (.*)", "refused", r"unless \1: \2"),
    (r"changes nothing at (.*); else dropped: (.*)", "dropped", r"unless \1: \2"),
    (r"dropped: (.*)", "dropped", r"\1"),
    (r"not here: (.*)", "refused", r"\1"),
    (r"(.*)", "translated", r"\1"),
)
"""What a translator says of a key -> its kind, and the words of the table."""


def migration_table(rows: Callable[[], list[list[str]]]) -> str:
    """What becomes of every key or flag of another system; those alike share a row."""
    tables: dict[str, dict[str, list[str]]] = {kind: {} for kind in KINDS_OF_MIGRATION}
    for name, said in rows():
        pattern, kind, words = next(each for each in MIGRATED if re.fullmatch(each[0], said))
        tables[kind].setdefault(re.sub(f"^{pattern}$", words, said), []).append(name)

    parts = []
    for kind, head in KINDS_OF_MIGRATION.items():
        same = [[_joined(names), said] for said, names in tables[kind].items()]
        parts += [_table(list(head), same)] if same else []
    return "\n\n".join(parts)


def _joined(names: list[str]) -> str:
    """Names with the commands that take them, each name once: `beta` (dpo), (grpo)."""
    commands: dict[str, list[str]] = {}
    for name in names:
        flag, _, command = name.partition(" (")
        commands.setdefault(flag, []).extend([command.rstrip(")")] if command else [])
    return ", ".join(
        f"{flag} ({', '.join(taken)})" if taken else flag for flag, taken in commands.items()
    )


def listing_table(system: str, name: str) -> str:
    """A listing beside ours, and the command that it becomes."""
    text = (DOCS / "data" / "listings" / f"{name}.txt").read_text("utf-8")
    (done,) = migrate(system, text)
    command = f"```text\n{done.command()}\n```"
    if not done.lines:
        return f"```text\n{text.rstrip()}\n```\n\nbecomes\n\n{command}"
    rows = []
    for said, lines in itertools.groupby(done.lines, key=operator.itemgetter(1)):
        rows.append(["<br>".join(f"`{line}`" for line, _ in lines), said])
    return f"{command}\n\n{_table(['there', 'here'], rows)}"


TABLES: dict[str, tuple[str, Callable[[], str]]] = {
    "flat-names": ("python.md", flat_name_table),
    "keys": ("configuration.md", key_table),
    "rewards": ("rewards.md", reward_key_table),
    "sft-keys": ("sft.md", partial(recipe_key_table, SFT, RunConfig)),
    "reward-model-keys": ("reward_model.md", partial(recipe_key_table, REWARD_MODEL, RowConfig)),
    "detached-keys": ("detached.md", partial(recipe_key_table, DETACHED, PPOConfig)),
    "columns": ("dataflow.md", column_table),
    "presets": ("algorithms.md", preset_table),
    "estimators": ("algorithms.md", estimator_table),
    "policy-losses": ("algorithms.md", policy_loss_table),
    "aggregations": ("algorithms.md", aggregation_table),
    "value-loss": ("algorithms.md", value_loss_table),
    "kl": ("algorithms.md", kl_table),
    "preference-losses": ("preference.md", preference_loss_table),
    "preference-keys": ("preference.md", preference_key_table),
    "lr-schedules": ("updates.md", lr_schedule_table),
    "verl": ("coming_from_verl.md", partial(migration_table, verl.doc_rows)),
    "verl_sft": ("coming_from_verl.md", partial(migration_table, partial(doc_rows, "verl_sft"))),
    "openrlhf": (
        "coming_from_openrlhf.md",
        partial(migration_table, partial(doc_rows, "openrlhf", "--")),
    ),
    "openrlhf_rows": (
        "coming_from_openrlhf.md",
        partial(migration_table, partial(doc_rows, "openrlhf_rows", "--")),
    ),
    "trl": ("coming_from_trl.md", partial(migration_table, partial(doc_rows, "trl"))),
    "coati": (
        "coming_from_colossalchat.md",
        partial(migration_table, partial(doc_rows, "coati", "--")),
    ),
    "listing-split_placement": (
        "coming_from_verl.md",
        partial(listing_table, "verl", "split_placement"),
    ),
    "listing-makers_and_trainers": (
        "coming_from_colossalchat.md",
        partial(listing_table, "coati", "makers_and_trainers"),
    ),
    "listing-chatgpt": ("coming_from_chatgpt.md", partial(listing_table, "chatgpt", "chatgpt")),
    "listing-train_ppo_ray": (
        "coming_from_openrlhf.md",
        partial(listing_table, "openrlhf", "train_ppo_ray"),
    ),
    "corrections": ("algorithms.md", correction_table),
    "preset-cards": ("cards.md", preset_card_list),
    "estimator-cards": ("cards.md", estimator_card_list),
    "policy-loss-cards": ("cards.md", policy_loss_card_list),
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
