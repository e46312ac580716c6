"""Environments with several trained players: a trajectory and rewards for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.workers.agents.test_loop import HERE, WIDTH, drawn_of, fresh_engine, same_bits
from workers.agents.chat import TurnRenderer
from workers.agents.environment import EnvironmentSpec
from workers.agents.host import EnvironmentHost
from workers.agents.loop import TurnLoop
from workers.agents.trajectory import Trajectory, TrajectoryStart
from workers.config import EnvironmentConfig
from workers.rollout.base import SamplingParams
from workers.rollout.sampling import noise_key

PLAYERS = ("white", "black")
Pairs = list[list[Trajectory]]
Play = Callable[..., Pairs]


@pytest.fixture
def play(tokenizer: Any, model: Any, host_of: Callable[..., EnvironmentHost]) -> Play:
    """Play two-player trajectories; return those of each environment."""

    def played(
        name: str = "Duel",
        num: int = 2,
        players: tuple[str, ...] = PLAYERS,
        num_open: int = 64,
        kwargs: dict[str, Any] | None = None,
        **settings: Any,
    ) -> Pairs:
        config = EnvironmentConfig(**{"max_tokens_per_turn": 6, "retries": 0, **settings})
        stops = (tokenizer.eos_token_id,)
        chat = TurnRenderer(tokenizer, [], stops)
        path = name if ":" in name else f"{HERE}:OfRowForTwo"
        host = host_of(EnvironmentSpec(path), 20.0)
        loop = TurnLoop(fresh_engine(model), host, chat, config)
        starts = []
        for game in range(num):
            for player in players:
                seeds = noise_key(0, "uid", -1), noise_key(0, "uid", game)
                key = noise_key(0, f"uid:{player}", game)
                row = {"number": game, "game": name, "settings": kwargs or {}}
                start = TrajectoryStart(
                    "a", row, seeds, key, player, environment_key=game, player=player
                )
                starts.append(start)
        sampling = SamplingParams(max_tokens=WIDTH, stop_token_ids=stops)
        trajectories = loop.play(starts, sampling, num_open)
        size = len(players)
        return [trajectories[n : n + size] for n in range(0, len(trajectories), size)]

    return played


def said_by(trajectory: Trajectory, tokenizer: Any) -> list[str]:
    """Return the texts of a player."""
    drawn, turns = drawn_of(trajectory), torch.tensor(trajectory.turns)
    tokens = trajectory.sample.tokens
    texts = [tokens[drawn & (turns == n)].tolist() for n in range(trajectory.num_turns)]
    return [tokenizer.decode(ids, skip_special_tokens=True) for ids in texts]


@pytest.mark.parametrize("both", [False, True], ids=["in turn", "at once"])
def test_each_player_has_its_own_texts_and_rewards(play: Play, tokenizer: Any, both: bool) -> None:
    for white, black in play(kwargs={"both": both}):
        longest = [max(map(len, said_by(player, tokenizer))) for player in (white, black)]
        assert [reward for _, reward in white.rewards] == [0.5, longest[0]]
        assert [reward for _, reward in black.rewards] == [0.5, -longest[1]]
        for player, name in ((white, "white"), (black, "black")):
            assert (player.ended, player.num_turns, player.is_left_out) == ("terminated", 2, False)
            for turn, (place, _) in enumerate(player.rewards):
                assert (player.turns[place], bool(drawn_of(player)[place])) == (turn, True)
                assert place + 1 == len(player.turns) or not drawn_of(player)[place + 1]
            first = tokenizer.decode(player.sample.prompt)
            assert (name in first) == (both or name == "white")
            observed = tokenizer.decode(player.sample.tokens[~drawn_of(player)])
            expected = "go on" if both or name == "white" else "your move"
            assert observed == f"<user>{expected}<assistant>"


def test_the_bits_of_a_game_do_not_depend_on_its_neighbors(play: Play) -> None:
    together = [player for game in play() for player in game]
    alone = [player for game in play(num_open=1) for player in game]
    same_bits(together, alone)


def test_a_player_that_leaves_lets_the_others_go_on(play: Play) -> None:
    for white, black in play(kwargs={"leaves": True}, max_turns=2):
        assert (white.ended, white.num_turns, white.rewards[0][1]) == ("terminated", 1, 0.25)
        assert (black.ended, [reward for _, reward in black.rewards]) == ("terminated", [0.0, 1.0])


def test_the_last_turn_of_a_player_ends_the_game(play: Play) -> None:
    for white, black in play(kwargs={"rounds": 9}, max_turns=2):
        assert (white.ended, black.ended) == ("max_turns", "max_turns")
        assert 1 <= black.num_turns <= white.num_turns == 2


def test_a_game_that_fails_is_played_again_by_all(play: Play) -> None:
    for white, black in play("FailsOnce", retries=0):
        assert "told to" in white.problem
        assert white.problem == black.problem
        assert white.is_left_out
        assert black.is_left_out
    for white, black in play("FailsOnce", retries=1, kwargs={"mark": "again"}):
        assert (white.attempts, black.attempts) == (2, 2)
        assert (white.problem, black.problem, black.num_turns) == ("", "", 1)


def test_answers_that_no_player_waits_for_are_failures(play: Play) -> None:
    words = [
        "returned no Turn, so nobody speaks next",
        "expected a dict with keys from",
        "rewards 'black'",
        "expected a dict with keys from",
        "not a Turn",
    ]
    for (white, black), problem in zip(play("Stalls", num=5), words, strict=True):
        assert problem in white.problem
        assert black.is_left_out


def test_an_agent_asks_for_its_players_by_model(play: Play) -> None:
    path = "tests.workers.agents.agents:negotiates"
    for buyer, seller in play(path, num=1, players=("buyer", "seller")):
        assert (buyer.problem, buyer.num_turns, seller.num_turns) == ("", 2, 1)
        assert [reward for _, reward in buyer.rewards] == [1.0, 0.25]
        assert [reward for _, reward in seller.rewards] == [-1.0]
        place, _ = buyer.rewards[-1]
        assert (buyer.turns[place], bool(drawn_of(buyer)[place])) == (0, True)
