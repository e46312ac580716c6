"""Secrets are not written, and other values stay unchanged."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from trainer.config.keys import flat_config
from trainer.ppo.config import PPOConfig
from verl_like import masking
from verl_like.masking import MASK, is_secret_name, mask_text, masked
from verl_like.process.host import RoleState
from verl_like.process.info import ProcessInfo


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The secrets of a process without any in its environment."""
    secrets: set[str] = set()
    monkeypatch.setattr(masking, "_known", lambda: secrets)
    return secrets


@pytest.mark.parametrize(
    "name",
    ["HF_TOKEN", "WANDB_API_KEY", "token", "api-key", "apikey", "AWS_SECRET_ACCESS_KEY",
     "password", "DB_PASSWORD", "client_secret", "db.password", "credentials"],
)  # fmt: skip
def test_secret_names_are_recognized(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    ["token_env", "max_tokens", "eos_token", "pad_token", "monkey", "key", "prompt_key",
     "ppo_max_token_len_per_gpu", "stop_token_ids", "tokenizer", "secretary"],
)  # fmt: skip
def test_other_names_are_not_secret(name: str) -> None:
    assert not is_secret_name(name)


def test_secrets_are_masked_everywhere(known: set[str]) -> None:
    tree = {
        "env": {"HF_TOKEN": "hf_0123456789", "LANG": "C"},
        "rewards": [{"url": "http://me:pass-word@host:1/v1", "api_key": "sk-abcdefgh", "n": 3}],
        "token": None,
    }
    assert masked(tree) == {
        "env": {"HF_TOKEN": MASK, "LANG": "C"},
        "rewards": [{"url": f"http://me:{MASK}@host:1/v1", "api_key": MASK, "n": 3}],
        "token": None,
    }
    assert masked(masked(tree)) == masked(tree)
    assert known == {"hf_0123456789", "sk-abcdefgh"}
    text = "refused: hf_0123456789 at http://me:pass-word@host (sk-abcdefgh)"
    assert mask_text(text) == f"refused: {MASK} at http://me:{MASK}@host ({MASK})"


def test_secrets_of_the_environment_are_masked_except_short_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    masking._known.cache_clear()
    monkeypatch.setenv("SOME_TOKEN", "abcdefgh12345")
    monkeypatch.setenv("OTHER_TOKEN", "step")
    assert mask_text("step abcdefgh12345") == f"step {MASK}"
    monkeypatch.undo()
    masking._known.cache_clear()


def test_no_default_of_a_run_is_masked() -> None:
    plain = json.loads(json.dumps(asdict(PPOConfig())))
    assert masked(plain) == plain


def test_runs_that_differ_in_a_secret_have_the_same_configuration(known: set[str]) -> None:
    one, other = PPOConfig(), PPOConfig()
    one.ray.runtime_env = {"env_vars": {"HF_TOKEN": "hf_0123456789"}}
    other.ray.runtime_env = {"env_vars": {"HF_TOKEN": "hf_9876543210"}}
    assert flat_config(one) == flat_config(other)


def test_prints_of_a_role_are_logged_without_secrets(
    known: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known.add("hf_0123456789")
    state = RoleState("actor", ProcessInfo("actor", log_dir=str(tmp_path)))
    with state:
        print("with hf_0123456789 in it", file=sys.stderr)
    state.close()
    assert (tmp_path / "actor-0.log").read_text() == f"with {MASK} in it\n"
    assert capsys.readouterr().err == f"with {MASK} in it\n"
