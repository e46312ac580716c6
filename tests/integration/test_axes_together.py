"""Every layout with every other feature of a run, as `axes.py` lists them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.integration import axes
from tests.integration.runs import (
    assert_same_numbers,
    numbers,
    overrides,
    with_experts,
    write_jsonl,
)
from trainer import load_config, run
from trainer.async_training.recipe import ASYNC
from trainer.ppo.recipe import PPO
from trainer.preference.recipe import DPO
from trainer.reward_model.recipe import REWARD_MODEL
from trainer.sft.recipe import SFT
from verl_like.errors import ConfigError

RECIPES = {"ppo": PPO, "async": ASYNC, "sft": SFT, "dpo": DPO, "reward_model": REWARD_MODEL}
QUICK = [
    ("LoRA", "shard x sp"),
    ("generators (`async`)", "ep x sp"),
    ("`sft` with LoRA", "shard x pp"),
    ("`dpo`", "sp x tp"),
    ("`dpo`", "tp x pp"),
    ("LoRA", "ep x tp"),
    *[("int8 reference on such ranks", layout) for layout in ("sp x tp", "sp x pp", "ep x sp")],
    *[("int8 reference on such ranks", layout) for layout in ("shard x sp", "ep x shard")],
]
OF_THE_CLOCK = ("async/", "training/weight")
TEXTS = [{"prompt": f"say {x}", "response": x * (1 + n % 3)} for n, x in enumerate("abcdefghijkl")]
PAIRS = [
    {"prompt": f"say {x}", "chosen": x * 2, "rejected": "cd"[: 1 + n % 2]}
    for n, x in enumerate("efghijklmnop")
]
ON_ROWS = (
    *("data.train_batch_size=6", "data.max_length=32"),
    *("optim.lr=1e-3", "trainer.logger=[]"),
)
Numbers = list[dict[str, float]]


def without_clock(metrics: dict[str, float]) -> dict[str, float]:
    return {name: n for name, n in metrics.items() if not name.startswith(OF_THE_CLOCK)}


def cells() -> list[Any]:
    return [
        pytest.param(
            feature,
            layout,
            marks=[] if (feature, layout) in QUICK else [pytest.mark.slow],
            id=f"{feature}, {layout}",
        )
        for feature in axes.FEATURES
        for layout in axes.LAYOUTS
    ]


class Runs:
    """Two steps of a feature, with a layout or in one process."""

    def __init__(self, tiny: Path, folder: Path, classifier: Path) -> None:
        self.folder, self.models = folder, {"dense": tiny / "model", "experts": folder / "experts"}
        self.names = {"tiny": tiny, "classifier": classifier}
        for name, rows in {"rows": TEXTS, "pairs": PAIRS}.items():
            self.names[name] = write_jsonl(folder / f"{name}.jsonl", rows)
        with_experts(tiny, self.models["experts"])
        self.one_process: dict[tuple[str, str], Numbers] = {}
        self.count = 0

    def in_one_process(self, feature: str, model: str) -> Numbers:
        """Return the numbers of one process, computed once for all layouts."""
        if (feature, model) not in self.one_process:
            layout = axes.Layout(1, (), model)
            self.one_process[feature, model] = self.two_steps(feature, layout)
        return self.one_process[feature, model]

    def two_steps(self, name: str, layout: Any) -> Numbers:
        feature, model = axes.FEATURES[name], self.models[layout.model]
        self.count += 1
        folder = self.folder / str(self.count)
        steps = ["trainer.backend=local", "trainer.total_training_steps=2"]
        if feature.recipe != "async":
            steps.append(f"trainer.n_gpus_per_node={layout.num_ranks}")
        if feature.recipe in ("ppo", "async"):
            policy = "actor_rollout_ref"
            steps += [f"{policy}.model.path={model}", f"{policy}.actor.use_kl_loss=true"]
            steps += [f"critic.model.path={model}"]
            steps += ["placement=colocate"] if feature.recipe == "ppo" else []
            steps = overrides(self.names["tiny"], folder, *steps)
        else:
            steps += [f"model.path={model}", f"trainer.default_local_dir={folder}", *ON_ROWS]
        over_axes = [f"{s}.parallel.{a}".lstrip(".") for s in feature.sections for a in layout.axes]
        names = {**self.names, "model": model, "num_ranks": layout.num_ranks}
        settings = [setting.format(**names) for setting in feature.settings]
        run(load_config([*steps, *over_axes, *settings], RECIPES[feature.recipe]))
        return numbers(folder)


@pytest.fixture(scope="module")
def runs(tiny_dir: Path, classifier: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tiny_dir, tmp_path_factory.mktemp("together"), classifier)


@pytest.mark.long
@pytest.mark.parametrize(("feature", "layout_name"), cells())
def test_a_layout_with_another_feature_equals_one_process_or_is_rejected(
    feature: str, layout_name: str, runs: Runs
) -> None:
    layout = axes.LAYOUTS[layout_name]
    if text := axes.error_of(feature, layout_name):
        with pytest.raises(ConfigError, match=re.escape(text)):
            runs.two_steps(feature, layout)
        return
    steps, of_one = runs.two_steps(feature, layout), runs.in_one_process(feature, layout.model)
    for numbers_of_run in (steps, of_one):
        assert sum(any(name.endswith("grad_norm") for name in n) for n in numbers_of_run) == 2
    assert_same_numbers(map(without_clock, steps), map(without_clock, of_one))
