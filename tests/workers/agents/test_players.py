"""Environments with several trained players: each player has a trajectory and rewards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.workers.agents.test_loop import (
    HERE,
    assert_same_bits,
    new_loop,
    sampled_mask,
    sampling_of,
)
from workers.agents.host import EnvironmentHost
from workers.agents.load_environment import EnvironmentSpec
from workers.agents.trajectory import Trajectory, TrajectoryStart
from workers.rollout.sampling import sample_seed

PLAYERS = ("white", "black")
Pairs = list[list[Trajectory]]
Play = Callable[..., Pairs]


def starts_of(num: int, players: tuple[str, ...] = PLAYERS, **row: Any) -> list[TrajectoryStart]:
    """Return the starts of all players in `num` environments, each with its number in its row."""
    seed, starts = sample_seed(0, "uid", -1), []
    for number in range(num):
        for player in players:
            seeds, key = (
                (seed, sample_seed(0, "uid", number)),
                sample_seed(0, f"uid:{player}", number),
            )
            start = TrajectoryStart("a", {"number": number, **row}, seeds, key, player)
            starts.append(replace(start, environment_key=number, player=player))
    return starts


@pytest.fixture
def play(tokenizer: Any, model: Any, host_of: Callable[..., EnvironmentHost]) -> Play:
    """Return a function that plays trajectories of two players, and returns them in pairs."""

    def play_pairs(
        name: str = "Duel", num: int = 2, num_open: int = 64, kwargs: Any = None, **settings: Any
    ) -> Pairs:
        host = host_of(EnvironmentSpec(f"{HERE}:OfRowForTwo"), 20.0)
        loop = new_loop(model, tokenizer, host, **settings)
        starts = starts_of(num, **{"class": name, "settings": kwargs or {}})
        trajectories = loop.play(starts, sampling_of(tokenizer), num_open)
        return [trajectories[n : n + 2] for n in range(0, len(trajectories), 2)]

    return play_pairs


def texts_of(trajectory: Trajectory, tokenizer: Any) -> list[str]:
    """Return the sampled text of every turn."""
    turns, tokens = torch.tensor(trajectory.turns), trajectory.sample.tokens
    masks = [sampled_mask(trajectory) & (turns == n) for n in range(trajectory.num_turns)]
    return [tokenizer.decode(tokens[mask].tolist(), skip_special_tokens=True) for mask in masks]


@pytest.mark.parametrize("both", [False, True], ids=["in turn", "at once"])
def test_each_player_has_its_own_texts_and_rewards(play: Play, tokenizer: Any, both: bool) -> None:
    for white, black in play(kwargs={"both": both}):
        longest = [max(map(len, texts_of(player, tokenizer))) for player in (white, black)]
        assert [reward for _, reward in white.rewards] == [0.5, longest[0]]
        assert [reward for _, reward in black.rewards] == [0.5, -longest[1]]
        for player, name in ((white, "white"), (black, "black")):
            is_sampled = sampled_mask(player)
            assert (player.ended, player.num_turns, player.is_left_out) == ("terminated", 2, False)
            for turn, (place, _) in enumerate(player.rewards):
                assert (player.turns[place], bool(is_sampled[place])) == (turn, True)
                assert place + 1 == len(player.turns) or not is_sampled[place + 1]
            first = tokenizer.decode(player.sample.prompt)
            assert (name in first) == (both or name == "white")
            observed = tokenizer.decode(player.sample.tokens[~is_sampled])
            expected = "go on" if both or name == "white" else "your move"
            assert observed.replace("<eos>", "") == f"<user>{expected}<assistant>"


def test_bits_do_not_depend_on_concurrent_environments(play: Play) -> None:
    for together, separate in zip(play(), play(num_open=1), strict=True):
        assert_same_bits(together, separate)


def test_the_other_player_continues_if_one_leaves(play: Play) -> None:
    for white, black in play(kwargs={"leaves": True}, max_turns=2):
        assert (white.ended, white.num_turns, white.rewards[0][1]) == ("terminated", 1, 0.25)
        assert (black.ended, [reward for _, reward in black.rewards]) == ("terminated", [0.0, 1.0])


def test_max_turns_of_one_player_ends_all_trajectories(play: Play) -> None:
    for white, black in play(kwargs={"rounds": 9}, max_turns=2):
        assert (white.ended, black.ended) == ("max_turns", "max_turns")
        assert 1 <= black.num_turns <= white.num_turns == 2


def test_a_failed_environment_is_retried_for_all_players(play: Play) -> None:
    for white, black in play("FailsOnce", retries=0):
        assert "failed once" in white.problem
        assert white.problem == black.problem
        assert white.is_left_out
        assert black.is_left_out
    for white, black in play("FailsOnce", retries=1, kwargs={"mark": "again"}):
        assert (white.attempts, black.attempts) == (2, 2)
        assert (white.problem, black.problem, black.num_turns) == ("", "", 1)


def test_invalid_replies_to_players_are_failures(play: Play) -> None:
    words = [
        "gives no player the next turn",
        "expected a dict with keys from",
        "rewards 'black'",
        "expected a dict with keys from",
        "not an Observation",
    ]
    for (white, black), problem in zip(play("Stalls", num=5), words, strict=True):
        assert problem in white.problem
        assert black.is_left_out
