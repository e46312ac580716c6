"""The golden curve: five seeded PPO steps on the tiny task, in `golden_ppo.json`.

    python -m tests.integration.golden    # writes it again, after an intended change of numbers

`test_golden.py` runs the same steps and compares.
"""

from __future__ import annotations

import json
import runpy
import tempfile
from pathlib import Path

from tests.integration.runs import numbers, overrides
from trainer import load_config, run

SETTINGS = ("trainer.total_training_steps=5", "algorithm.kl_ctrl.type=adaptive")
"""In addition to the critic, the reference and the two mini-batches of `overrides`."""
HOME = Path(__file__).resolve().parent
FILE = HOME / "golden_ppo.json"
NAMES = (
    "critic/score/mean", "critic/rewards/mean", "response_length/mean", "critic/values/mean",
    "critic/advantages/max",
    "actor/pg_loss", "actor/grad_norm", "actor/ppo_kl", "actor/reward_kl_penalty",
    "critic/vf_loss", "critic/grad_norm",
)  # fmt: skip


def on_all_prompts(tiny: Path, folder: Path, *more: str) -> list[str]:
    """Return `overrides`, with the prompts of the golden curve."""
    return overrides(tiny, folder, f"data.train_files={tiny}/train.parquet", *more)


def settings(tiny: Path, folder: Path, *more: str) -> list[str]:
    """Return the settings of the five steps."""
    return on_all_prompts(tiny, folder, *SETTINGS, *more)


def curve(tiny: Path, folder: Path) -> list[dict[str, float]]:
    """Return the numbers of five steps in this process."""
    run(load_config(settings(tiny, folder, "trainer.backend=local", "placement=colocate")))
    return [{name: line[name] for name in NAMES} for line in numbers(folder)]


def main() -> None:
    """Write the file."""
    make = runpy.run_path(str(HOME.parents[1] / "examples/tiny/make.py"))["make"]
    with tempfile.TemporaryDirectory() as folder:
        steps = curve(make(Path(folder) / "tiny"), Path(folder) / "run")
    FILE.write_text(json.dumps(steps, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
