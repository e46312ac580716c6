"""`verl-like check-environment` plays an environment without a model."""

from __future__ import annotations

import pytest

from trainer.cli.check_environment import main

GAMES = "tests.workers.agents.games"


def test_it_says_what_is_observed_and_what_holds(capsys: pytest.CaptureFixture[str]) -> None:
    main([f"{GAMES}:Count", "--say", "5", "6"])
    said = capsys.readouterr().out
    assert "reset (" in said
    assert "): 'go'\n" in said
    assert "): '1', reward 0.5\n" in said
    assert "): end, reward 3\n" in said
    assert "the same seed gives the same trajectory, also next to a concurrent one" in said
    assert "all samples of a prompt start with the same observation" in said


def test_players_speak_in_turn(capsys: pytest.CaptureFixture[str]) -> None:
    main([f"{GAMES}:Duel", "--say", "a", "bb"])
    said = capsys.readouterr().out
    assert "): black: 'your move'\n" in said
    assert "): white: 'go on', reward 0.5\n" in said
    assert "): white: end, reward 2; black: end, reward -2\n" in said
    assert "the same seed gives the same trajectory, also next to a concurrent one" in said


def test_tools_are_named_and_called(capsys: pytest.CaptureFixture[str]) -> None:
    call = '{"name": "increment", "arguments": {"step": 2}}'
    main([f"{GAMES}:Counter", "--row", '{"number": 4}', "--say", call, "done"])
    said = capsys.readouterr().out
    assert said.startswith("tools: increment\n")
    assert "'6', reward 0" in said
    assert "end, reward 6" in said


@pytest.mark.parametrize(
    ("name", "more", "words"),
    [
        ("Clock", (), "the same seed gives a different trajectory from reply 1 on"),
        ("Own", (), "two samples of a prompt begin with different observations"),
        ("Strange", ("--kwargs", '{"answer": "no"}'), "ValueError: the reward is None, not a"),
        ("Hangs", ("--row", '{"number": 0}', "--step-s", "0.5"), "no answer within environment"),
    ],
)
def test_what_is_wrong_is_said(
    name: str, more: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([f"{GAMES}:{name}", *more])
    assert ended.value.code == 1
    assert f"error: {words}" in capsys.readouterr().err.replace("TypeError: ", "")


def test_what_not_ending_earns_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    main([f"{GAMES}:Count", "--kwargs", '{"turns": 9}', "--turns", "3"])
    said = capsys.readouterr().out
    assert "not ended after 3 turns. If environment.max_turns ended it there, " in said
    assert "its reward would be 1.5\n" in said


def test_what_an_environment_cuts_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    main(["gymnasium:FrozenLake-v1", "--kwargs", '{"max_episode_steps": 2}', "--say", "0"])
    said = capsys.readouterr().out
    assert "Say a number from 0 to 3." in said
    assert "): cut, reward 0\n" in said
