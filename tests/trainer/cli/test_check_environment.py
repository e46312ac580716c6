"""`verl-like check-environment` plays an environment without a model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from trainer.cli.check_environment import main
from verl_like.errors import ConfigError

GAMES = "tests.workers.agents.games"


def test_it_prints_observations_and_checks_determinism(capsys: pytest.CaptureFixture[str]) -> None:
    main([f"{GAMES}:Count", "--say", "5", "6"])
    output = capsys.readouterr().out
    assert "reset (" in output
    assert "): 'go'\n" in output
    assert "): '1', reward 0.5\n" in output
    assert "): end, reward 3\n" in output
    assert "the same seed gives the same trajectory, even next to a concurrent one" in output
    assert "all samples of a prompt start with the same observation" in output


def test_images_are_shown_by_their_places(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "a.png")
    Image.new("RGB", (4, 4)).save(path)
    main([f"{GAMES}:Shows", "--kwargs", json.dumps({"turns": [[path], [path, path]]})])
    output = capsys.readouterr().out
    assert "): '<image>look'\n" in output
    assert "): 'then <image>then <image>?', reward 0\n" in output


def test_players_take_turns(capsys: pytest.CaptureFixture[str]) -> None:
    main([f"{GAMES}:Duel", "--say", "a", "bb"])
    output = capsys.readouterr().out
    assert "): black: 'your move'\n" in output
    assert "): white: 'go on', reward 0.5\n" in output
    assert "): white: end, reward 2; black: end, reward -2\n" in output
    assert "the same seed gives the same trajectory, even next to a concurrent one" in output


def test_tools_are_listed_and_called(capsys: pytest.CaptureFixture[str]) -> None:
    call = '{"name": "increment", "arguments": {"step": 2}}'
    main([f"{GAMES}:Counter", "--row", '{"number": 4}', "--say", call, "done"])
    output = capsys.readouterr().out
    assert output.startswith("tools: increment\n")
    assert "'6', reward 0" in output
    assert "end, reward 6" in output


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("Clock", (), "the same seed gives a different trajectory from reply 1 on"),
        ("Own", (), "two samples of a prompt begin with different observations"),
        ("Strange", ("--kwargs", '{"answer": "no"}'), "ValueError: the reward is None, not a"),
        (
            "Hangs",
            ("--row", '{"number": 0}', "--step-timeout-s=0.5"),
            "no answer within environment",
        ),
    ],
)
def test_a_faulty_environment_is_an_error(
    name: str, options: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([f"{GAMES}:{name}", *options])
    assert ended.value.code == 1
    assert f"error: {words}" in capsys.readouterr().err.replace("TypeError: ", "")


def test_a_parameter_of_reset_that_is_no_column_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "typo.py"
    file.write_text("class Typo:\n    def reset(self, rwo): ...\n    def step(self, text): ...\n")
    with pytest.raises(SystemExit):
        main([f"{file}:Typo"])
    error = capsys.readouterr().err
    assert "reset has the parameter 'rwo'" in error
    assert "Did you mean 'row'?" in error
    with pytest.raises(ConfigError, match=f"environment={file}:Typ: .* Did you mean 'Typo'"):
        main([f"{file}:Typ"])


def test_an_environment_that_never_ends_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([f"{GAMES}:Count", "--kwargs", '{"turns": 9}', "--max-turns", "3"])
    assert ended.value.code == 1
    errors = capsys.readouterr().err
    assert "not ended after 3 turns. Return a TrajectoryEnd, raise --max-turns, or" in errors
    assert "its reward would be 1.5.\n" in errors


def test_a_truncated_episode_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    main(["gymnasium:FrozenLake-v1", "--kwargs", '{"max_episode_steps": 2}', "--say", "0"])
    output = capsys.readouterr().out
    assert "Say a number from 0 to 3." in output
    assert "): cut, reward 0\n" in output
