"""Several rewards in a run: functions, models with roles of their own, a server; and errors."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.integration.runs import FEW_ROWS, calls, lines, overrides
from trainer import load_config, main_ppo, run
from verl_like.errors import ConfigError
from workers.config import model_rewards
from workers.rewards.remote import RewardServer
from workers.rewards.scorer import FunctionSpec

GRPO = (
    *("trainer.backend=local", "placement=colocate", "algorithm.use_kl_in_reward=false"),
    *("algorithm.adv_estimator=grpo", "trainer.total_training_steps=1"),
)
FUNCTION = """
def letters(solution_str, raw_prompt, num_tokens):
    return {"score": len(set(solution_str)) / 8, "tokens": num_tokens}
"""


def test_a_run_whose_rewards_all_fail_exits_with_their_error(
    tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, folder = tmp_path / "mine.py", tmp_path / "run"
    path.write_text("def broken(solution_str):\n    return 1 / 0\n", encoding="utf-8")
    rewards = f"reward.list=[{{name: mine, path: '{path}', function: broken, on_failure: skip}}]"
    settings = overrides(tiny_dir, folder, *GRPO, *FEW_ROWS, rewards)
    settings = [key for key in settings if not key.startswith("critic.")]
    monkeypatch.setattr(sys, "argv", ["verl-like", *settings])
    with pytest.raises(SystemExit) as ended:
        main_ppo.main()
    error = ended.value.code
    assert isinstance(error, str), "the exit code is not 1"
    assert error.startswith(
        f"error: the reward function 'broken' in {path} failed for 8 of 8 samples"
    )
    assert "more than reward.max_failed_fraction=0.5 allows" in error
    assert error.endswith(
        f"ZeroDivisionError: division by zero\n    at {path}, line 2: return 1 / 0"
    )
    assert not (folder / "metrics.jsonl").read_text(encoding="utf-8")


def test_functions_models_and_a_server_score_together(
    tiny_dir: Path, classifier: Path, tmp_path: Path
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(FUNCTION, encoding="utf-8")
    server = RewardServer(FunctionSpec(str(path), "letters"))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    rewards = (
        "reward.list=[{name: function},"
        f"{{name: here, path: '{path}', function: letters, weight: 2}},"
        f"{{name: there, kind: remote, url: '{server.url}', weight: 0.5}},"
        f"{{name: first, kind: model, path: '{classifier}'}},"
        f"{{name: second, kind: model, path: '{classifier}', weight: -1, normalize: true}}]"
    )
    try:
        run(load_config(overrides(tiny_dir, tmp_path, *GRPO, rewards)))
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

    last = lines(tmp_path)[-1]
    assert last["reward/here_score/mean"] == last["reward/there_score/mean"]  # to the bit
    assert last["reward/here/tokens/mean"] == last["response_length/mean"]
    assert last["reward/first_score/mean"] == last["reward/second_score/mean"] != 0
    total = last["reward/function_score/mean"] + 2.5 * last["reward/here_score/mean"]
    total += last["reward/first_score/mean"]  # the second has mean 0
    assert last["critic/score/mean"] == pytest.approx(total, abs=1e-5)
    roles = {call["cat"] for call in calls(tmp_path, "compute_rm_score")}
    assert roles == {"reward_model", "reward_model_second"}


def test_other_models_share_the_pool_of_the_first_unless_they_are_mapped(
    tiny_dir: Path, tmp_path: Path
) -> None:
    rewards = (
        "reward.list=[" + ",".join(f"{{name: {n}, kind: model, path: m}}" for n in "abc") + "]"
    )
    elsewhere = "role_mapping.reward_model_c=actor_rollout_ref_pool"
    settings = (rewards, "placement=split", "trainer.n_gpus_per_node=2", elsewhere)
    config = load_config(overrides(tiny_dir, tmp_path, *settings))
    assert config.role_mapping["reward_model_b"] == config.role_mapping["reward_model"]
    assert config.role_mapping["reward_model_c"] == "actor_rollout_ref_pool"
    names = [reward.name for reward in model_rewards(config).values()]
    assert names == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            ["reward.list=[{name: a}, {name: a}]"],
            r"reward.list\[1\].name='a': every reward needs a unique name",
        ),
        (["reward.list=[{}]"], r"reward.list\[0\].name is empty"),
        (["reward.list=[{name: a, weight: 0}]"], "every weight in reward.list is 0 \\(a\\)"),
        (
            ["reward.list=[{name: a, kind: modle, path: m}]"],
            r"reward.list\[0\].kind=modle.*Did you mean",
        ),
        (["reward.list=[{name: a, kind: model}]"], r"reward.list\[0\] is a model. Set its path"),
        (["reward.list=[{name: a, kind: remote, url: host}]"], "url='host' does not have the form"),
        (["reward.list=[{name: a, timeout_s: 0}]"], r"reward.list\[0\].timeout_s=0.*above 0"),
        (["reward.list=[{name: a, wieght: 2}]"], "wieght"),
        (
            ["reward.list=[{name: a, normalize: true}]", "algorithm.adv_estimator=remax"],
            "would be normalized separately",
        ),
    ],
)
def test_an_invalid_list_is_rejected(
    tiny_dir: Path, tmp_path: Path, settings: list[Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(overrides(tiny_dir, tmp_path, *settings))
