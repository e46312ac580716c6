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
    assert "the same seed plays the same game, alone and beside another" in said
    assert "the samples of a prompt begin alike" in said


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
        ("Clock", (), "the same seed plays another game, first in answer 1"),
        ("Remembers", (), "the same seed plays another game, first in answer 0"),
        ("Own", (), "two samples of a prompt begin with different observations"),
        ("Dies", (), "its process has ended"),
        ("Strange", ("--kwargs", '{"answer": "number"}'), "step returned int 3, not a Turn or"),
    ],
)
def test_what_is_wrong_is_said(
    name: str, more: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([f"{GAMES}:{name}", *more])
    assert ended.value.code == 1
    assert f"error: {words}" in capsys.readouterr().err.replace("TypeError: ", "")


def test_one_that_never_ends_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    main([f"{GAMES}:Says", "--kwargs", '{"text": "no"}', "--turns", "3"])
    assert "it has not ended after 3 turns" in capsys.readouterr().out
