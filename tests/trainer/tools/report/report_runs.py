"""Synthetic run folders of any size."""

from __future__ import annotations

import json
import math
from pathlib import Path

from trainer.ppo.stages import PPOTrainer
from trainer.run_folder.timeline import Timeline

PLACEMENT = """pool                    node       devices     roles           processes  CPUs
actor_rollout_ref_pool  this host  1 CPU slot  actor, rollout  1          1
critic_pool             this host  1 CPU slot  critic          1          1
"""
CALLS = (
    ("actor_rollout_ref_pool", "rollout", "generate_sequences", 0.0, 0.3),
    ("actor_rollout_ref_pool", "actor", "compute_log_prob", 0.3, 0.4),
    ("critic_pool", "critic", "compute_values", 0.3, 0.45),
    ("actor_rollout_ref_pool", "actor", "update_actor", 0.5, 0.9),
    ("critic_pool", "critic", "update_critic", 0.5, 0.8),
)


def metrics_of(step: int) -> dict[str, float]:
    names = (
        "critic/score/mean", "critic/score/min", "critic/score/max", "actor/reward_kl_penalty",
        "actor/entropy",
        "response_length/mean", "response_length/min", "response_length/max", "actor/pg_loss",
        "critic/vf_loss",
        "actor/grad_norm", "critic/grad_norm", "training/rollout_probs_diff_mean",
        "perf/overlap_ratio",
        "actor/pg_clipfrac", "perf/throughput",
    )  # fmt: skip
    values = {name: place + math.sin(step / 9 + place) for place, name in enumerate(names)}
    times = {
        "step": 1.0,
        "sample": 0.3,
        "score": 0.15,
        "estimate": 0.02,
        "update": 0.4,
        "sync": 0.1,
    }
    return {
        "step": step,
        **values,
        **{f"timing_s/{name}": seconds for name, seconds in times.items()},
    }


def make_run(
    folder: Path, num_steps: int, samples: int = 20, response: str = "aaaa", num_ranks: int = 1
) -> Path:
    """Create a run of `num_steps` steps in which actor and critic update concurrently.

    The ranks of a call end up to 0.05 s apart.
    """
    (folder / "rollouts").mkdir(parents=True)
    lines = [json.dumps(metrics_of(step)) + "\n" for step in range(1, num_steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(lines))
    (folder / "placement.txt").write_text(PLACEMENT)
    timeline = Timeline(folder / "timeline.json", stages=PPOTrainer.recipe.stages)
    for step in range(1, num_steps + 1):
        timeline.add(
            {
                "pool": pool, "role": role, "rank": rank, "method": method, "pid": 7, "cpu_s": 0.1,
                "step": step, "start": step + start, "end": step + end - 0.05 * rank / num_ranks,
            }
            for pool, role, method, start, end in CALLS
            for rank in range(num_ranks)
        )  # fmt: skip
        rows = [
            {
                "input": f"say {'abcd'[i % 4]}",
                "output": response,
                "gts": "a",
                "score": i / samples,
                "step": step,
            }
            for i in range(samples)
        ]
        (folder / "rollouts" / f"{step}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows)
        )
    return folder


def policy_turn(text: str, reward: float, **timings: float) -> dict[str, object]:
    """Return a turn of the policy, as the lines of samples have it."""
    seconds = {"engine_s": 0.02, "environment_s": 0.01, "waiting_s": 0.01}
    turn = {"role": "assistant", "text": text, "reward": reward, "tokens": 2, "observed_tokens": 3}
    return {**turn, **seconds, **timings}


def environment_turn(text: str) -> dict[str, object]:
    return {"role": "user", "text": text, "reward": None}


def make_played_run(folder: Path, num_steps: int = 5, samples: int = 6) -> Path:
    """Create a run as `make_run` does; its samples are trajectories of one to four turns."""
    make_run(folder, num_steps, samples)
    for file in (folder / "rollouts").iterdir():
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        for number, row in enumerate(rows):
            exchanges = [policy_turn("ab", 0.0), environment_turn("no")] * (number % 4)
            row |= {"turns": [*exchanges, policy_turn("ok", row["score"])], "ended": "terminated"}
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder
