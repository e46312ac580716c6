"""Write the generated parts of the docs: `python docs/make_tables.py`.

Tables are between `<!-- begin … -->` and `<!-- end … -->` in the pages that `TABLES` names; a test
checks that they are current. `docs/cards.py` reads an algorithm's row and card from its file.
The repository's address comes from `pyproject.toml`.
"""

from __future__ import annotations

import inspect
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_origin

import yaml
from api_tables import PAGES as API_PAGES
from api_tables import keyword_table, name_list
from cards import (
    ACTOR,
    LOSS_MODE,
    Card,
    correction_table,
    estimator_cards,
    left_to_the_user,
    names_by_entry,
    policy_loss_cards,
    preset_leaves,
    preset_text,
)
from command_tables import command_list, command_options
from model_table import model_table
from worked_tables import memory_table, token_weights

from trainer.async_training.recipe import ASYNC
from trainer.cli.check import doc_parts
from trainer.config.keys import Key, config_keys, field_docs, leaf_keys, value_at
from trainer.config.schema import Recipe, RunConfig
from trainer.ppo import verl_keys
from trainer.ppo.advantages.registry import ADVANTAGE_ESTIMATORS, needs_groups
from trainer.ppo.config import PPOConfig
from trainer.ppo.recipe import PPO
from trainer.preference.recipe import DPO
from trainer.reward_model.recipe import REWARD_MODEL
from trainer.rows.config import RowConfig
from trainer.sft.recipe import SFT
from trainer.tools.migrate.translation import FlagRow, Table, read_table
from trainer.tools.report.figures import METRICS_FILE
from workers.columns import COLUMNS
from workers.config import KL_ESTIMATORS as KL_NAMES
from workers.config import LOSS_AGG_MODES, RewardConfig
from workers.losses.aggregate import AGGREGATIONS
from workers.losses.kl import KL_ESTIMATORS
from workers.losses.preference import COLUMNS as LOSS_COLUMNS
from workers.losses.preference import PREFERENCE_LOSSES, parameters_of
from workers.losses.value import compute_value_loss
from workers.roles.reference import TeacherWorker  # noqa: F401 - says what column it writes
from workers.training.optim import LR_SCHEDULES

DOCS = Path(__file__).resolve().parent
LOSS_AGG_MODE = f"{ACTOR}loss_agg_mode"

KEY_PAGES = {
    "keys_run.md": ("", "trainer", "ray"),
    "keys_models.md": ("actor_rollout_ref", "critic", "parallel", "ptx", "distillation"),
    "keys_rollout.md": ("actor_rollout_ref.rollout", "environment"),
    "keys_rewards.md": ("reward",),
    "keys_algorithm.md": ("algorithm",),
    "keys_data.md": ("data",),
}
"""Page -> the sections whose keys it has, with those below them unless another page names them."""
USUAL_KEYS = yaml.safe_load((DOCS / "data" / "usual_keys.yaml").read_text(encoding="utf-8"))
"""Page -> the keys that most runs set, with when to change them."""


def key_page(section: str) -> str:
    """The page that has the keys of a section."""
    pages = {name: page for page, names in KEY_PAGES.items() for name in names}
    while section not in pages:
        section = section.rpartition(".")[0]
    return pages[section]


class KeyRow(NamedTuple):
    """A row of a table of keys; the name of a key that a resumed run may change ends with ↻."""

    name: str
    kind: str
    default: str
    meaning: str


def key_sections() -> dict[str, tuple[str, list[KeyRow], str]]:
    """Return section -> heading, rows, and the sections that have the same rows."""
    PPO.load_registries()
    keys = {key.name: key for key in config_keys(PPOConfig)}
    docs = field_docs(PPOConfig)
    sections: dict[str, list[Key]] = {}
    for key in keys.values():
        if not key.is_section:
            sections.setdefault(key.section, []).append(key)
    alike: dict[tuple[KeyRow, ...], list[str]] = {}
    for name, of_section in sections.items():
        alike.setdefault((*_rows_of_keys(PPOConfig, of_section, leaf_names=True),), []).append(name)
    own_sections = {key.kind for key in keys.values() if key.is_section}
    for key in keys.values():
        if (options := key.rules.options) is not None and options not in own_sections:
            alike.setdefault((*_rows_of_keys(options, leaf_keys(options)),), []).append(key.name)

    sections = {}
    for rows, (first, *others) in alike.items():
        heading = "## Top level"
        if first:
            heading = f"## `{first}`{'↻' if keys[first].rules.may_change_on_resume else ''}"
            if keys[first].is_section:
                heading += f"\n\n{docs[first]}"
        same = f"The same keys are in {_code(others)}." if others else ""
        sections[first] = (heading, [*rows], same)
    names = [*keys]
    in_order = sorted(sections, key=lambda name: names.index(name) if name else len(names))
    return {name: sections[name] for name in in_order}


def key_table(page: str) -> str:
    """Return the keys that are usually set, and a table for each section of a page.

    A key that repeats one of an earlier section refers to it.
    """
    sections = {name: of for name, of in key_sections().items() if key_page(name) == page}
    usual = ["Usually set|When to change it", "---|---"]
    for key, when in USUAL_KEYS[page].items():
        section = key.rpartition(".")[0]
        section = section if section in sections else section.rpartition(".")[0]
        link = f"[`{key}`](#{section.replace('.', '')})" if section in sections else f"`{key}`"
        usual.append(f"{link}|{when}")
    parts, first = ["\n".join(usual)], dict[KeyRow, str]()
    for name, (heading, rows, same) in sections.items():
        shown = []
        for row in rows:
            earlier = first.setdefault(row, name)
            is_long = len(row.meaning.split()) > 8
            repeats = is_long and earlier != name
            shown.append(row._replace(meaning=f"As in `{earlier}`.") if repeats else row)
        parts += filter(None, [heading, _key_rows(shown), same])
    return "\n\n".join(parts)


def _key_rows(rows: Iterable[KeyRow]) -> str:
    """Return rows as a table."""
    return "\n".join(["Key|Type|Default|Meaning", "---|---|---|---", *map("|".join, rows)])


def _rows_of_keys(schema: type, keys: list[Key], leaf_names: bool = False) -> list[KeyRow]:
    """Return a row for each key."""
    docs, defaults = field_docs(schema), schema()
    rows = []
    for key in keys:
        default, doc = value_at(defaults, key.name), _cell(docs[key.name])
        shown = _show(default)
        if isinstance(default, dict) and default:
            shown = ""
            for name, number in default.items():
                doc = doc.replace(f"`{name}`", f"`{name}` ({number:g})")
        name = f"`{key.leaf if leaf_names else key.name}`"
        name += "↻" if key.rules.may_change_on_resume else ""
        rows.append(KeyRow(name, _type(key, default, docs[key.name]), shown, doc))
        if key.rules.options is not None and isinstance(default, dict):
            of_options = {each.name: each for each in leaf_keys(key.rules.options)}
            for below, value in default.items():
                meaning = _cell(field_docs(key.rules.options)[below])
                kind = _type(of_options[below], value, meaning)
                rows.append(KeyRow(f"{name[:-1]}.{below}`", kind, _show(value), meaning))
    return rows


def recipe_key_table(recipe: Recipe[Any], base: type[RunConfig]) -> str:
    """Return the keys that a recipe adds to `base`, and a list of the keys it shares with PPO."""
    for each in (PPO, recipe):
        each.load_registries()
    of_base = {key.name for key in leaf_keys(base)}
    further = [key for key in leaf_keys(recipe.schema) if key.name not in of_base]
    of_ppo = set() if issubclass(recipe.schema, PPOConfig) else _what_keys_are(PPOConfig)
    docs, default = field_docs(recipe.schema), recipe.schema()
    same = [
        key
        for key in further
        if key.name not in ALWAYS_LISTED
        and (_what_it_is(key, docs, default) in of_ppo or ".fsdp_config." in key.name)
    ]
    listed = sorted((key for key in further if key not in same), key=_place)
    parts = [_key_rows(_rows_of_keys(recipe.schema, listed))]
    if same:
        sections = dict.fromkeys(key.name.rpartition(".")[0] or key.name for key in same)
        parts.append(f"The other keys of {_code(sections)} are [as in PPO](keys_models.md).")
    return "\n\n".join(parts)


ALWAYS_LISTED = ("model.path", "model.lora_rank")
"""Keys that a recipe's list has although PPO has the same."""
FIRST_SECTIONS = ("model.path", "model.lora_rank", "loss", "data", "optim")
"""Keys and sections that begin a recipe's list."""


def _place(key: Key) -> int:
    """Return the place of a key in a recipe's list."""
    names = (key.name, key.name.partition(".")[0])
    places = [place for place, name in enumerate(FIRST_SECTIONS) if name in names]
    return min(places, default=len(FIRST_SECTIONS))


def _what_keys_are(schema: type) -> set[tuple[str, ...]]:
    docs, default = field_docs(schema), schema()
    keys = [key for key in leaf_keys(schema) if not key.name.startswith("critic.")]
    return {_what_it_is(key, docs, default) for key in keys}


def _what_it_is(key: Key, docs: Mapping[str, str], default: Any) -> tuple[str, ...]:
    """Return what distinguishes two keys of different recipes."""
    doc = docs[key.name]
    value = value_at(default, key.name)
    return (key.leaf, _type(key, value, doc), _show(value), doc)


LISTED_ELSEWHERE = {
    KL_NAMES: "a [KL estimator](algorithms.md#kl-estimators)",
    "advantage estimator": "an [estimator](algorithms.md#advantage-estimators), or a dotted path",
    "policy loss": "a [policy loss](algorithms.md#policy-losses), or a dotted path",
    LOSS_AGG_MODES: "an [aggregation](algorithms.md#aggregation)",
}
"""Choices, or the registry that has them -> the link to their table."""
CORRECTION = "([list](algorithms.md#correction-for-samples-of-another-policy))"
SAID_BY_THE_MEANING = {
    *("a number", "a name", "a folder", "a list of sections", "a dotted path", "a column"),
    *("a .py file or a module", "a folder or a name", "role: pool", "role: dotted path"),
    *("what the function takes", "what the class takes", "what `ray.init` takes"),
}


def reward_key_table() -> str:
    """The keys of one item of `reward.list`."""
    return _key_rows(_rows_of_keys(RewardConfig, leaf_keys(RewardConfig)))


def preference_key_table() -> str:
    """Return the keys that preference training adds to the keys of every recipe on rows."""
    return recipe_key_table(DPO, RowConfig)


SIGNS = (
    (r"\babove (-?[\d.]+)", r">\1"),
    (r"(-?[\d.]+) or (above|more)", r"≥\1"),
    (r"from ([\d.]+) to ([\d.]+)", r"\1 to \2"),
    (r" and at most ([\d.]+)", r", ≤\1"),
    (r" and below ([\d.]+)", r", <\1"),
)
"""Words of a range -> the same in signs."""

LOWER_BOUND = re.compile(r"[>≥](0|1|-1)")
"""A range that goes without saying; the error of a number outside of it gives it."""


def _type(key: Key, default: Any, doc: str) -> str:
    """Return the allowed values, or the type if the type or the meaning gives them."""
    kinds = get_args(key.kind) if key.is_optional else (key.kind,)
    names = ["text" if kind is str else (get_origin(kind) or kind).__name__ for kind in kinds]
    kind = " or ".join(name for name in names if name != "NoneType")
    if key.rules.options is not None:  # its keys have a table of their own
        return "section"
    words = LISTED_ELSEWHERE.get(key.rules.registry or key.rules.choices) or _cell(key.allowed)
    words = words.removesuffix(", or null").replace("(see Algorithms)", CORRECTION)
    for value in ("null", "-1", "0"):  # the meaning says what it does
        if re.search(rf"(^|[\s(]){value}\b", doc):
            words = re.sub(rf", (or |where )?{value}\b.*", "", words)
    for text, sign in SIGNS:
        words = re.sub(text, sign, words) if key.range else words
    if key.is_optional and default is not None and not re.search("null", words + doc):
        words = f"{words}, or null"
    if isinstance(default, bool) or words in SAID_BY_THE_MEANING or LOWER_BOUND.fullmatch(words):
        words = ""
    return f"{kind} {words}" if key.range and words else words or kind


def column_table() -> str:
    """Return lines of columns that have a shape, a type and a writer in common."""
    names: dict[tuple[str, str, str], list[str]] = {}
    for column in COLUMNS.values():
        if column.role not in OUR_ROLES or not column.written_by:
            continue  # a role of a user, which this process has imported
        key = (f"`{column.shape}`", str(column.dtype), column.written_by)
        names.setdefault(key, []).append(column.name)
    rows = list[str]()
    for (*about, writer), columns in names.items():
        shown = [] if tuple(about) == USUAL_COLUMN else about
        rows.append(f"{' '.join([_code(columns), *shown])}|{' '.join(writer.split())}")
    return "\n".join(["Columns|Written by", "---|---", *rows])


OUR_ROLES = ("", "actor", "critic", "critic_copy", "ref", "reward_model", "rollout", "teacher")
USUAL_COLUMN = ("`[rows, R]`", "float32")
"""Shape and type of most columns, which the page states once."""


def estimator_table() -> str:
    """The advantage estimators, by what they compare a sample with."""
    rows: dict[str, list[Card]] = {
        "the critic's values": [],
        "the prompt's other samples (`rollout.n` above 1)": [],
        "the batch, or a greedy response": [],
    }
    for card in estimator_cards():
        with_values, with_group, with_others = rows.values()
        is_of_group = needs_groups(ADVANTAGE_ESTIMATORS[card.names[0]])
        kind = (
            with_values if "values" in card.columns else with_group if is_of_group else with_others
        )
        kind.append(card)
    links = [[compared, _links(cards)] for compared, cards in rows.items()]
    return _list(links)


def policy_loss_list() -> str:
    """The policy losses, with links to their cards."""
    return f"{_links(policy_loss_cards())}."


def _links(cards: list[Card]) -> str:
    """Names that lead to cards, with the other names of each."""
    parts = []
    for card in cards:
        others = f" ({_code(card.names[1:])})" if card.names[1:] else ""
        parts.append(f"{_link_to_card(card.names[0])}{others}")
    return ", ".join(parts)


def value_loss_table() -> str:
    """The critic's losses."""
    row = [*_formula_and_source(compute_value_loss), _code(["critic.cliprange_value"])]
    return _list([[_code(["clipped"]), *row]])


def preference_loss_table() -> str:
    """The sources and keys of the losses of preference training; the page has their formulas."""
    rows = []
    for name, loss in PREFERENCE_LOSSES.items():
        keys = [parameter for parameter in parameters_of(loss) if parameter not in LOSS_COLUMNS]
        rows.append([_code([name]), f"{_formula_and_source(loss)[1]}. Keys: {_code(keys)}"])
    return _list(rows, "Name|Source")


def kl_table() -> str:
    """The KL estimators."""
    rows = []
    for names, estimate in names_by_entry(KL_ESTIMATORS).items():
        rows.append([_code(names), *_formula_and_source(estimate)])
    return _list(rows)


def aggregation_table() -> str:
    """The ways from token losses to one number."""
    rows = [[_code([name]), *about] for name, about in AGGREGATIONS.items()]
    return _list(rows)


def lr_schedule_table() -> str:
    """The learning-rate schedules."""
    rows = []
    for names, schedule in names_by_entry(LR_SCHEDULES).items():
        keys = list(inspect.signature(schedule).parameters)[1:]
        rows.append([_code(names), *_formula_and_source(schedule), _code(keys)])
    return _list(rows)


def metric_lists() -> str:
    """Return a table for every group of metrics in the report's `metrics.yaml`.

    A unit that the meaning contains is left out.
    """
    groups = yaml.safe_load(METRICS_FILE.read_text(encoding="utf-8"))
    parts = []
    for title, metrics in groups.items():
        rows = [
            f"`{name}`|{'' if unit == '-' or has_word(meaning, unit) else unit}|{_cell(meaning)}"
            for name, (unit, meaning) in metrics.items()
        ]
        parts.append("\n".join([f"## {title}", "", "Metric|Unit|Meaning", "---|---|---", *rows]))
    return "\n\n".join(parts)


def has_word(text: str, word: str) -> bool:
    """Return whether the text contains the word; the s of a genitive is none."""
    return bool(re.search(rf"(?<![\w']){re.escape(word)}(?!\w)", text))


def preset_table() -> str:
    """The presets of `algorithm`: what each file says of itself, without the KL (a setting)."""
    rows = []
    for preset in PPO.preset_names("algorithm"):
        text = PRESET_KL_TEXT.sub("", _about_preset("algorithm", preset))
        source, colon, about = text.partition(": ")
        rows.append(
            [_code([preset]), f"{source}. {about[0].upper()}{about[1:]}" if colon else source]
        )
    return _list(rows)


PRESET_KL_TEXT = re.compile(r"([;,.]| and) (no KL|KL in the (loss|reward))(?=[.,])", re.I)


def _about_preset(group: str, preset: str) -> str:
    """The comment at the head of its file."""
    lines = preset_text(group, preset).splitlines()[1:]
    return " ".join(line.removeprefix("# ") for line in lines if line.startswith("#"))


def preset_settings() -> str:
    """Return a row of settings for each preset, with columns for the usual choices."""
    lines = ["|".join(["Preset", *PRESET_COLUMNS, "KL", "Other settings"])]
    lines.append("|".join(["---"] * (len(PRESET_COLUMNS) + 3)))
    for preset in PPO.preset_names("algorithm"):
        to_set = dict.fromkeys(left_to_the_user("algorithm", preset), "...")
        leaves = preset_leaves("algorithm", preset) | to_set
        settings = {key: _shown_setting(value) for key, value in leaves.items()}
        cells = []
        for keys in PRESET_COLUMNS.values():
            cell = ", ".join(settings.pop(key) for key in keys if key in settings)
            cells.append(cell and f"`{cell}`")
        kl = ""
        for place, (is_on, estimator, coefficient) in PRESET_KL.items():
            if settings.pop(is_on, ""):
                kl = f"{place}: `{settings.pop(estimator)}`, {settings.pop(coefficient)}"
        others = [f"{key.removeprefix(POLICY)}={value}" for key, value in settings.items()]
        others = [setting for setting in others if setting != "algorithm.kl_ctrl.type=fixed"]
        lines.append("|".join([_code([preset]), *cells, kl, _code(others)]))
    return "\n".join(lines)


def _shown_setting(value: Any) -> str:
    """Return a preset's value; of another key, its name."""
    text = _show(value).strip("`")
    for resolver, words in SETTINGS_IN_WORDS.items():
        text = text.replace(resolver, words)
    return text


SETTINGS_IN_WORDS = {
    "${divide:${data.max_response_length},5}": "data.max_response_length/5",
    "${data.train_batch_size}": "data.train_batch_size",
}
POLICY = "actor_rollout_ref."
PRESET_COLUMNS = {
    "Estimator": ["algorithm.adv_estimator"],
    "Loss": [LOSS_MODE],
    "Clip range": [f"{ACTOR}clip_ratio", f"{ACTOR}clip_ratio_low", f"{ACTOR}clip_ratio_high"],
    "Aggregation": [LOSS_AGG_MODE],
    "`n`": ["actor_rollout_ref.rollout.n"],
}
"""Column -> the keys whose values it shows."""
PRESET_KL = {
    "reward": ["algorithm.use_kl_in_reward", "algorithm.kl_penalty", "algorithm.kl_ctrl.kl_coef"],
    "loss": [f"{ACTOR}use_kl_loss", f"{ACTOR}kl_loss_type", f"{ACTOR}kl_loss_coef"],
}
"""Place of the KL -> the keys that switch it on, choose its estimator and its coefficient."""


def estimator_card_list() -> str:
    """A card for each advantage estimator."""
    return _algorithm_cards(estimator_cards())


def policy_loss_card_list() -> str:
    """A card for each policy loss."""
    return _algorithm_cards(policy_loss_cards())


def _algorithm_cards(cards: list[Card]) -> str:
    """Return the cards; one refers to an earlier card that has the same to watch."""
    parts, said = [], dict[str, str]()
    for card in cards:
        first = said.setdefault(card.watch, card.names[0])
        watch = card.watch if first == card.names[0] else f"as for `{first}`."
        parts.append(_algorithm_card(card._replace(watch=watch)))
    return "\n\n".join(parts)


def _algorithm_card(card: Card) -> str:
    facts = [f"**Source:** {' '.join(card.source.split())}"]
    if keys := [
        key.removeprefix("actor_rollout_ref.actor.") for key in card.keys if key != LOSS_AGG_MODE
    ]:
        facts.append(f"**Keys:** {_code(keys)}")
    facts.append(f"**Watch:** {' '.join(card.watch.split())}")
    if card.names[1:]:
        facts.insert(0, f"**Also called:** {_code(card.names[1:])}")
    prose = [text for text in card.formula.split("\n\n") if not text.startswith("    ")]
    return "\n\n".join([f"### `{card.names[0]}`", *prose, "  \n".join(facts)])


def _link_to_card(name: str) -> str:
    return f"[`{name}`](cards.md#{name})"


def _formula_and_source(algorithm: Callable[..., Any]) -> tuple[str, str]:
    formula, _, source = doc_parts(algorithm)
    assert source, f"the docstring of {algorithm.__name__} has no paragraph `Source: …`"
    return formula, source


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _list(rows: list[list[str]], head: str = "Name|Meaning") -> str:
    """Return a table of names, and what they are (source), with the keys that are read."""
    lines = [head, "---|---"]
    for names, what, *more in rows:
        source = f" ({_cell(more[0])})" if more else ""
        keys = f" Keys: {more[1]}." if more[1:] and more[1] else ""
        lines.append(f"{names}|{_cell(what)}{source}{keys}")
    return "\n".join(lines)


def _show(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "`null`" if value is None else f"`{str(value).lower()}`"
    value = list(value) if isinstance(value, tuple) else value
    if isinstance(value, str) and value.startswith(("trainer.", "workers.")):
        value = value.rpartition(".")[2]  # a class of ours
    return f"`{value}`" if value != "" else ""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def flag_rows(system: str, dashes: str = "") -> list[list[str]]:
    """(there, here) of every flag in a table of `migrate`."""
    tree = read_table(system)
    sections = list(tree) if "all" in tree else [""]
    rows = []
    for section in sections:
        of_command = f" ({section})" if section not in ("", "all") else ""
        for name, row in Table(system, *filter(None, [section])).rows.items():
            rows.append([f"`{dashes}{name}`{of_command}", _here(row)])
    return sorted(rows)


def _here(row: FlagRow) -> str:
    """Return the translation of a flag."""
    if row.always:
        return f"always: {row.always}"
    if absent := row.absent or row.rejected:
        what = f"{'dropped' if row.absent else 'not here'}: {absent}"
        values = ", ".join(f"`{value}`" for value in row.at)
        return f"changes nothing at {values}; else {what}" if values else what
    return row.taken_with or ", ".join(f"`{key.removeprefix('+')}`" for key in row.settings)


def verl_rows() -> list[list[str]]:
    """(there, here) of verl's keys that have another name, or no counterpart, here."""
    fields = {key.rules.verl: key.name for key in config_keys(PPOConfig) if key.rules.verl}
    table = verl_keys.tables()

    def without(name: str) -> str:
        lays_out = any(fnmatchcase(name, pattern) for pattern in table.lays_out)
        return "dropped" if lays_out else "not here"

    here = {name: f"`{ours}`" for name, ours in {**fields, **table.renamed}.items()}
    for name, row in table.changes_nothing_at.items():
        listed = ", ".join(f"`{value}`" for value in row["at"])
        here[name] = f"changes nothing at {listed}; else {without(name)}: {row['else']}"
    here |= {name: f"{without(name)}: {remedy}" for name, remedy in table.not_here.items()}
    for name in table.lays_out:
        if name not in here and (outcome := verl_keys.translate_key(name.replace("*", "x"), "any")):
            here[name] = f"dropped: {outcome.rejected}"
    return sorted([f"`{name}`", text] for name, text in here.items())


NOT_NEEDED = re.compile(
    r"(always|changes nothing|dropped): .*|changes nothing at .*else dropped: .*"
)
REJECTED = re.compile(r"not here: .*|changes nothing at .*; else not here: .*")
ROLE = re.compile(r"`(actor_rollout_ref\.actor|actor_rollout_ref\.ref|critic)\.")
OF_POLICY = re.compile(r"(?<=`)actor_rollout_ref\.(actor\.)?")


COMMON = {
    "verl": (
        "*.ulysses_sequence_parallel_size *.megatron.tensor_model_parallel_size "
        "*.megatron.pipeline_model_parallel_size *.megatron.expert_model_parallel_size "
        "actor_rollout_ref.actor.fsdp_config.model_dtype *.optim.clip_grad *.optim.warmup_style "
        "custom_reward_function reward_model trainer.max_actor_ckpt_to_keep"
    ),
    "verl_sft": (
        "data.micro_batch_size data.multiturn.enable data.prompt_key data.response_key "
        "ulysses_sequence_parallel_size model.partial_pretrain optim.clip_grad optim.lr_scheduler "
        "trainer.n_gpus_per_node trainer.nnodes"
    ),
    "openrlhf": (
        "--actor_learning_rate --advantage_estimator --generate_max_len --init_kl_coef "
        "--n_samples_per_prompt --pretrain --prompt_data --reward_pretrain --zero_stage"
    ),
    "openrlhf_rows": (
        "--dataset --input_key --learning_rate --max_epochs --max_len --micro_train_batch_size "
        "--output_key --zero_stage"
    ),
    "trl": (
        "beta dataset_name learning_rate max_completion_length max_steps model_name_or_path "
        "num_generations num_train_epochs output_dir per_device_train_batch_size use_vllm"
    ),
    "coati": (
        "--max_epochs --max_input_len --num_makers --num_trainers --pretrain --prompt_path "
        "--rm_pretrain --train_batch_size --trainer_strategy"
    ),
}
"""System -> the renamed keys or flags that nearly every script has."""


def migration_list(
    system: str,
    rows: Callable[[], list[list[str]]],
    beside: Callable[[], list[list[str]]] = list,
) -> str:
    """The `COMMON` keys or flags of another system, then those rejected, by reason.

    Flags of which the list `beside` says the same are left out, and so are those that training
    does not need. `verl-like migrate` gives the way out for each name.
    """
    common = COMMON[system].split()
    known = {(name, OF_POLICY.sub("", said)) for name, said in beside()}
    outcomes: dict[str, set[str]] = {}
    for name, said in rows():
        outcomes.setdefault(name.partition(" (")[0], set()).add(said)
    renamed: dict[str, list[str]] = {}
    rejected: dict[str, str] = {}
    for name, said in _of_any_role(rows()):
        flag = name.partition(" (")[0]
        if (flag, OF_POLICY.sub("", said)) in known or NOT_NEEDED.fullmatch(said):
            continue
        name = name if len(outcomes.get(flag, ())) > 1 else flag
        if REJECTED.fullmatch(said):
            rejected[name] = reason_of(said)
        elif flag.strip("`") in common:
            renamed.setdefault(said, []).append(name)
    lines = ["There|Here", "---|---"]
    lines += [f"{_joined(names)}|{_cell(said)}" for said, names in renamed.items()]
    general = _most_general([*rejected])
    by_reason = {
        reason: _joined([name for name in general if rejected[name] == reason])
        for reason in sorted(dict.fromkeys(REASONS.values()), key=NO_EQUIVALENT.__eq__)
    }
    lines += ["", REJECTION, ""]
    lines += [f"- {reason}: {names}" for reason, names in by_reason.items() if reason and names]
    return "\n".join(lines)


REJECTION = "**Rejected** if they have an effect, among others:"


NO_EQUIVALENT = "no equivalent"
REASONS = {
    r"multimodal": "images and videos are not supported",
    r".*\bnot (supported|quantized|trained)\b": NO_EQUIVALENT,
    r"rename|use (a|one) file|convert rows|rows have|apply the template": "",
    r"set |.*; set |list |divide |rewrite |use (`verl-like|the built-in)|.*seed": "",
    r"merge |.*(folder|config.json|chat template)": "",
}
"""Start of a message, as a pattern -> its reason, in the order of the list.

Keys with an empty reason are not listed: the message says what to do instead.
"""


def reason_of(said: str) -> str:
    """Return why a key or flag is rejected, in a few words."""
    message = re.sub(r".*?not here: ", "", said)
    matching = (reason for start, reason in REASONS.items() if re.match(start, message))
    return next(matching, NO_EQUIVALENT)


def _of_any_role(rows: list[list[str]]) -> list[list[str]]:
    """Join the rows of several roles that have the same names after the role: `*.optim.lr`."""
    general = [tuple(ROLE.sub("`*.", cell) for cell in row) for row in rows]
    num_roles = Counter(general)
    joined = dict.fromkeys(
        names if num_roles[names] > 1 else tuple(row)
        for names, row in zip(general, rows, strict=True)
    )
    return [list(names) for names in joined]


def _most_general(names: list[str]) -> list[str]:
    """Leave out the names that another name, with a `*`, matches."""
    return [
        name
        for name in names
        if not any(other != name and fnmatchcase(name, other) for other in names)
    ]


def _joined(names: list[str]) -> str:
    """Names with the commands that take them, each name once: `beta` (dpo, kto)."""
    commands: dict[str, list[str]] = {}
    for name in names:
        flag, _, command = name.partition(" (")
        commands.setdefault(flag, []).extend([command.rstrip(")")] if command else [])
    return ", ".join(
        f"{flag} ({', '.join(taken)})" if taken else flag for flag, taken in commands.items()
    )


def tinker_method_list() -> str:
    """The methods of the tinker SDK that are rejected."""
    methods = json.loads((DOCS / "data" / "tinker_methods.json").read_text(encoding="utf-8"))
    return f"{_code(name for name, said in methods.items() if said != 'works')}."


TABLES: dict[str, tuple[str, Callable[[], str]]] = {
    "flat-names": ("python.md", keyword_table),
    **{page.removesuffix(".md"): (page, partial(key_table, page)) for page in KEY_PAGES},
    "rewards": ("rewards.md", reward_key_table),
    "models": ("models.md", model_table),
    "sft-keys": ("sft.md", partial(recipe_key_table, SFT, RunConfig)),
    "reward-model-keys": ("reward_model.md", partial(recipe_key_table, REWARD_MODEL, RowConfig)),
    "async-keys": ("async.md", partial(recipe_key_table, ASYNC, PPOConfig)),
    "memory": ("concepts.md", memory_table),
    "columns": ("dataflow.md", column_table),
    "tinker-methods": ("serve.md", tinker_method_list),
    "presets": ("algorithms.md", preset_table),
    "estimators": ("algorithms.md", estimator_table),
    "policy-losses": ("algorithms.md", policy_loss_list),
    "aggregations": ("algorithms.md", aggregation_table),
    "token-weights": ("algorithms.md", token_weights),
    "value-loss": ("algorithms.md", value_loss_table),
    "kl": ("algorithms.md", kl_table),
    "preference-losses": ("preference.md", preference_loss_table),
    "preference-keys": ("preference.md", preference_key_table),
    "lr-schedules": ("updates.md", lr_schedule_table),
    "verl": ("coming_from_verl.md", partial(migration_list, "verl", verl_rows)),
    "verl_sft": (
        "coming_from_verl.md",
        partial(migration_list, "verl_sft", partial(flag_rows, "verl_sft")),
    ),
    "openrlhf": (
        "coming_from_openrlhf.md",
        partial(migration_list, "openrlhf", partial(flag_rows, "openrlhf", "--")),
    ),
    "openrlhf_rows": (
        "coming_from_openrlhf.md",
        partial(
            migration_list,
            "openrlhf_rows",
            partial(flag_rows, "openrlhf_rows", "--"),
            partial(flag_rows, "openrlhf", "--"),
        ),
    ),
    "trl": ("coming_from_trl.md", partial(migration_list, "trl", partial(flag_rows, "trl"))),
    "coati": (
        "coming_from_colossalchat.md",
        partial(migration_list, "coati", partial(flag_rows, "coati", "--")),
    ),
    "corrections": ("algorithms.md", correction_table),
    "commands": ("commands.md", command_list),
    "command-options": ("commands.md", command_options),
    "metrics": ("metrics.md", metric_lists),
    "preset-settings": ("algorithms.md", preset_settings),
    "estimator-cards": ("cards.md", estimator_card_list),
    "policy-loss-cards": ("cards.md", policy_loss_card_list),
    **{
        f"api-{section}": (page, partial(name_list, page, section))
        for page, sections in API_PAGES.items()
        for section in sections
    },
}


def filled(name: str) -> tuple[Path, str]:
    """The page that holds the table `name`, with the table as it should be."""
    page, make = TABLES[name]
    path = DOCS / page
    block = f"<!-- begin {name} -->\n\n{make()}\n\n<!-- end {name} -->"
    old = re.compile(rf"<!-- begin {name} -->.*<!-- end {name} -->", re.S)
    return path, old.sub(lambda _: block, path.read_text("utf-8"))


def main() -> None:
    """Write every table."""
    for name in TABLES:
        path, text = filled(name)
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
