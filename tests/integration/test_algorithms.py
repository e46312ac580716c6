"""Algorithms with several rewards, scores per step, or state between steps."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

from tests.integration.runs import lines, numbers, overrides
from trainer import load_config, run

LOCAL = ("trainer.backend=local", "trainer.total_training_steps=2")
REWARDS = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    share = solution_str.count(ground_truth) / max(len(solution_str), 1)
    numbers = {"score": share, "share": share, "brevity": -len(solution_str)}
    return numbers | {"step_scores": [[0, share], [2, 0.0]]}
"""


def settings(tiny: Path, folder: Path, *more: str) -> list[str]:
    """Return a run without critic and reference, and without keys that nothing then reads."""
    out = ("critic.", "algorithm.use_kl_in_reward", "actor_rollout_ref.rollout.n=")
    base = [setting for setting in overrides(tiny, folder, *LOCAL) if not setting.startswith(out)]
    return [*base, "actor_rollout_ref.rollout.n=4", *more]


def run_with_rewards(tiny: Path, tmp_path: Path, *more: str) -> Path:
    folder, function = tmp_path / "run", tmp_path / "several_rewards.py"
    function.write_text(REWARDS, encoding="utf-8")
    run(load_config(settings(tiny, folder, f"reward.function.path={function}", *more)))
    return folder


def test_gdpo_trains_on_the_named_rewards(tiny_dir: Path, tmp_path: Path) -> None:
    folder = run_with_rewards(
        tiny_dir,
        tmp_path,
        "algorithm.adv_estimator=gdpo",
        "algorithm.gdpo_reward_keys=[share,brevity]",
        "algorithm.gdpo_reward_weights=[1.0,0.5]",
    )
    first, _ = lines(folder)
    assert first["reward/brevity/mean"] < 0
    assert abs(first["critic/advantages/mean"]) < 1e-5
    assert first["actor/grad_norm"] > 0


def test_scores_of_steps_reach_the_estimator(tiny_dir: Path, tmp_path: Path) -> None:
    folder = run_with_rewards(tiny_dir, tmp_path, "algorithm.adv_estimator=grpo_process")
    first, _ = lines(folder)
    samples = (folder / "rollouts" / "1.jsonl").read_text(encoding="utf-8").splitlines()
    for sample in map(json.loads, samples):
        assert math.isclose(sample["score"], 2 * sample["share"], abs_tol=1e-6)
    assert first["critic/advantages/max"] > 0


def test_a_resume_restores_the_driver_s_running_norms_and_random_state(
    tiny_dir: Path, tmp_path: Path
) -> None:
    more = (
        "algorithm.adv_estimator=reinforce_plus_plus",
        "algorithm.running_norm=[rewards,advantages]",
        "algorithm.use_pf_ppo=true",
        "actor_rollout_ref.actor.policy_loss.loss_mode=clip_cov",
        "trainer.save_freq=1",
    )
    run(load_config(settings(tiny_dir, tmp_path, *more)))
    expected = numbers(tmp_path)
    assert expected[1]["critic/rewards/running_mean"] != expected[0]["critic/rewards/running_mean"]
    assert expected[0]["pf_ppo/kept_ratio"] <= 1

    shutil.rmtree(tmp_path / "global_step_2")
    run(load_config(settings(tiny_dir, tmp_path, *more)))
    assert numbers(tmp_path) == expected
