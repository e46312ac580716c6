"""Every algorithm has a complete card: formula, source, what to watch, an example, a curve."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from tests import ROOT
from tests.conftest import load
from trainer import load_config
from trainer.config.keys import named_keys
from trainer.ppo.advantages.registry import ADVANTAGE_ESTIMATORS
from trainer.ppo.config import PPOConfig
from trainer.ppo.metrics import compute_data_metrics
from trainer.ppo.recipe import PPO
from verl_like.batch.protocol import DataProto
from workers.losses.registry import POLICY_LOSSES, traits_of

DOCS = load("docs/cards.py")
CARDS = [*DOCS.estimator_cards(), *DOCS.policy_loss_cards()]
CURVES = load("docs/make_curves.py")


def names_of(cards: list[Any]) -> set[str]:
    return {name for card in cards for name in card.names}


def in_backticks(text: str) -> list[str]:
    """Return the texts in backticks, except names with a placeholder such as `<name>`."""
    return [word for word in re.findall(r"`([^`]+)`", text) if "<" not in word]


@pytest.fixture(scope="module")
def metrics() -> set[str]:
    """Return metric names: those of any step, of the engine, and of policy losses."""
    column = torch.ones(1, 2)
    columns = ("token_level_scores", "token_level_rewards", "advantages", "returns", "values")
    batch = DataProto.from_dict(
        {name: column for name in (*columns, "entropys")}
        | {"response_mask": column.long(), "responses": column.long()}
        | {"attention_mask": torch.ones(1, 3, dtype=torch.int64)}
    )
    names = set(compute_data_metrics(batch)) | {"actor/grad_norm", "actor/pg_loss"}
    for path in (ROOT / "workers" / "losses").glob("*.py"):
        names |= set(re.findall(r'"(actor/\w+)"', path.read_text(encoding="utf-8")))
    return names


def test_every_registered_name_is_on_a_card() -> None:
    assert names_of(DOCS.estimator_cards()) == set(ADVANTAGE_ESTIMATORS)
    assert names_of(DOCS.policy_loss_cards()) == set(POLICY_LOSSES)


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.names[0])
def test_a_card_has_all_its_fields(card: Any) -> None:
    parts = ("formula", "watch", "source", "columns", "settings")
    assert [part for part in parts if not getattr(card, part)] == []


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.names[0])
def test_the_example_of_a_card_composes(card: Any) -> None:
    load_config(["data.train_files=t", "actor_rollout_ref.model.path=m", *card.settings])


def test_every_policy_loss_declares_the_keys_it_reads() -> None:
    assert [name for name, loss in POLICY_LOSSES.items() if traits_of(loss).keys_read is None] == []


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.names[0])
def test_the_metrics_and_keys_of_a_card_exist(card: Any, metrics: set[str]) -> None:
    """Metrics have a slash and keys a dot; the last parts of a key are enough."""
    keys = list(named_keys(PPOConfig))
    words = in_backticks(card.watch)
    assert [word for word in words if "/" in word and word not in metrics] == []

    ends = tuple(f".{word}" for word in words if "." in word)
    assert [end for end in ends if not any(f".{key}".endswith(end) for key in keys)] == []
    assert re.search(r"`\w+/", card.watch), "the card names no metric"


@pytest.mark.parametrize(("kind", "name"), CURVES.runs())
def test_an_algorithm_has_a_curve_that_rises(kind: str, name: str) -> None:
    wanted = f"run: python docs/make_curves.py --only {name}"
    scores = CURVES.read_scores().get(CURVES.id_of(kind, name))
    assert scores is not None, wanted
    assert len(scores) == CURVES.NUM_STEPS
    first, last = CURVES.first_and_last(scores)
    assert last > first + CURVES.LEAST_RISE


def test_every_curve_has_an_algorithm() -> None:
    known = {CURVES.id_of(*which) for which in CURVES.runs()}
    assert set(CURVES.read_scores()) == known


@pytest.mark.parametrize("preset", PPO.preset_names("algorithm"))
def test_a_preset_names_the_source_of_every_key(preset: str) -> None:
    """A line of its file sets one key, or opens a section."""
    lines = [line for line in DOCS.preset_text("algorithm", preset).splitlines() if line[0] != "#"]
    settings = [line for line in lines if not line.partition("  # ")[0].endswith(":")]
    assert len(settings) == len(DOCS.preset_leaves("algorithm", preset))
    assert [line for line in settings if "  # " not in line] == []
