"""`verl-like serve-reward` serves until it is stopped, and rejects unsafe options."""

from __future__ import annotations

import json
import signal
import subprocess
import urllib.request
from pathlib import Path

import pytest

from tests.programs import VERL_LIKE
from trainer.cli import serve_reward
from verl_like.errors import ConfigError
from workers.rewards.scorer import Scorer


def test_a_function_is_served_until_a_signal(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def own(solution_str, k): return k * len(solution_str)", encoding="utf-8")
    options = ["--function", f"{path}:own", "--kwargs", '{"k": 3}', "--port", "0"]
    command = [VERL_LIKE, "serve-reward", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = server.stdout.readline().split()[-1]
        body = json.dumps({"query": ["ab", "abc"], "prompts": ["a", "a"]}).encode()
        try:
            with urllib.request.urlopen(url, body, timeout=30) as response:
                assert json.load(response) == {"rewards": [3.0, 6.0], "extra_logs": {}}
        finally:
            server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=30) == 0


@pytest.mark.parametrize("function", [[], ["--function", "workers.rewards.code:run_tests"]])
@pytest.mark.parametrize("trust", [[], ["--trust-programs"]])
def test_asserts_score_only_on_trusted_programs(function: list[str], trust: list[str]) -> None:
    tests = {"asserts": ["assert f(1) < 2"]}
    sample = {"data_source": "taco", "solution_str": "def f(a): return a", "ground_truth": tests}
    spec = serve_reward._function(serve_reward._parser().parse_args([*function, *trust]))
    scorer = Scorer(spec, 60.0)
    try:
        scorer.start()
        ((score, _, error),) = scorer.score([{**sample, "trust_programs": True, "extra_info": {}}])
    finally:
        scorer.stop()
    assert score == (1.0 if trust else None)
    assert trust or "reward.trust_programs=true" in str(error)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--host", "0.0.0.0"], "open to other machines. Set a secret with --token-env"),
        (
            ["--token-env", "NO_SUCH_TOKEN"],
            "--token-env=NO_SUCH_TOKEN: this environment variable is not set",
        ),
        (["--sandbox", '{"memory": 1}'], "--sandbox: unknown memory. .* Did you mean 'memory_gib'"),
        (["--function", "no_such.py", "--port", "0"], "^--function=no_such.py: there is no such"),
        (["--function", "json:dumps", "--trust-programs"], "--trust-programs applies to the rule"),
    ],
)
def test_impossible_options_are_rejected(options: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        serve_reward.main(options)


def test_kwargs_that_are_no_object_are_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        serve_reward.main(["--kwargs", "[1]"])
    assert "argument --kwargs: [1] is not a JSON object" in capsys.readouterr().err
