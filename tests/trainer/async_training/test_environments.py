"""Asynchronous runs whose samples are trajectories."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.integration.runs import POLICY_ALONE, calls, lines, overrides
from tests.trainer.async_training.test_run import ledger_of, shared_numbers
from trainer.async_training.buffer import LOST
from trainer.async_training.recipe import ASYNC
from trainer.config.compose import load_config
from trainer.config.schema import Recipe
from trainer.launch import run
from trainer.ppo.recipe import PPO
from trainer.rollouts.turns import ENVIRONMENTS
from trainer.run_folder.accounts import tokens_of
from trainer.tools.report.page import write_report
from verl_like.errors import CallbackError
from workers.agents.trajectory import GIVEN_UP

GAMES = "tests.workers.agents.games"
FEW = ("data.train_batch_size=4",)
RETRIES = "agents/num_retries"
CLOCK = ("agents/engine_s", "agents/environment_s", "agents/waiting_s")
FAULTS = (RETRIES, "training/num_excluded_tokens", "training/num_sampled_tokens")


def play(
    tiny: Path,
    folder: Path,
    *more: str,
    game: str = "Count",
    recipe: Recipe[Any] = ASYNC,
    callbacks: Sequence[Any] = (),
) -> Path:
    sizes = ("data.max_prompt_length=24", "data.max_response_length=40", *POLICY_ALONE, *FEW)
    turns = ("environment.max_tokens_per_turn=5", "trainer.total_training_steps=2")
    where = ("trainer.backend=local", f"environment={GAMES}:{game}")
    config = load_config(overrides(tiny, folder, *where, *sizes, *turns, *more), recipe)
    run(config, callbacks=callbacks)
    return folder


def numbers(folder: Path) -> list[dict[str, float]]:
    """Return the metrics that depend neither on the clock nor on faults, and that every run has."""
    return [
        {name: value for name, value in line.items() if not name.startswith((*CLOCK, *FAULTS))}
        for line in shared_numbers(folder)
    ]


@pytest.fixture(scope="module")
def plain(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the synchronous run."""
    return play(tiny_dir, tmp_path_factory.mktemp("plain"), recipe=PPO)


@pytest.mark.long
def test_staleness_0_equals_the_synchronous_run(
    tiny_dir: Path, tmp_path: Path, plain: Path
) -> None:
    """Even if calls end in the middle of turns, and environments are killed or slow."""
    settings = (
        "async_training.max_staleness=0",
        "actor_rollout_ref.rollout.max_tokens_per_call=3",
        f"environment.kwargs.folder={tmp_path}",
    )
    folder = play(tiny_dir, tmp_path / "run", *settings, game="Faulty")
    assert numbers(folder) == numbers(plain)
    assert len(calls(folder, "collect")) > len(calls(folder, "submit"))
    killed = (tmp_path / "killed").stat().st_size
    assert killed == sum(line[RETRIES] for line in lines(folder)) > 4
    tokens = ledger_of(folder)["tokens"]
    trained, _ = tokens_of(lines(plain))
    assert (tokens["trained"], tokens["queued"]) == (trained, 0)
    assert tokens["left_out"].keys() == {GIVEN_UP}
    assert tokens["left_out"][GIVEN_UP] == tokens_of(lines(folder))[1][GIVEN_UP] >= killed
    page = write_report(folder).read_text(encoding="utf-8")
    assert f"= {trained:,} trained + {tokens['left_out'][GIVEN_UP]:,} excluded" in page
    waits = calls(folder, ENVIRONMENTS)
    assert waits
    assert sum(call["args"]["num_answers"] for call in waits) >= 4 * 2 * 2 * 4


class Ends:
    """A callback that ends the run as a kill of its process would."""

    def on_step_begin(self, trainer: Any) -> None:
        if trainer.global_step == 2:
            raise KeyError("the end")


@pytest.mark.long
def test_a_resumed_run_has_the_numbers_of_an_uninterrupted_one(
    tiny_dir: Path, tmp_path: Path
) -> None:
    """Its environments draw from every source of randomness."""
    more = ["async_training.max_staleness=0", "trainer.save_freq=1"]
    undisturbed = play(tiny_dir, tmp_path / "whole", game="Dice", recipe=PPO)
    with pytest.raises(CallbackError, match="the end"):
        play(tiny_dir, tmp_path / "resumed", *more, game="Dice", callbacks=[Ends()])
    resumed = play(tiny_dir, tmp_path / "resumed", *more, game="Dice")
    assert [line["step"] for line in lines(resumed)] == [1, 2]
    assert numbers(resumed) == numbers(undisturbed)
    assert tokens_of(lines(resumed)) == tokens_of(lines(undisturbed))


LOSES = "role_workers.rollout=tests.trainer.async_training.rigged_workers.DiesWithTurns"
SLOW = "environment.kwargs={sleep: 0.05}"


@pytest.mark.long
def test_lost_trajectories_are_played_again(tiny_dir: Path, tmp_path: Path, plain: Path) -> None:
    settings = (
        "async_training.max_staleness=0",
        "async_training.on_generator_failure=restart",
        LOSES,
        SLOW,
    )
    folder = play(tiny_dir, tmp_path, *settings)
    assert (folder / "has_died").is_file()
    assert numbers(folder) == numbers(plain)
    trained, _ = tokens_of(lines(plain))
    ledger = ledger_of(folder)
    tokens = {"sampled": trained, "trained": trained, "queued": 0, "left_out": {}}
    assert ledger["tokens"] == tokens
    assert ledger["generators"]["0"]["dropped"] == {LOST: 8}
