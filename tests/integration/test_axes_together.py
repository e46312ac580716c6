"""Every layout with every other feature of a run: each cell of `axes.py`, run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.integration import axes
from tests.integration.runs import numbers, overrides
from tests.integration.test_axes import with_experts
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


def cells() -> list[Any]:
    found = []
    for beside in axes.BESIDE:
        for layout in axes.LAYOUTS:
            marks = [] if (beside, layout) in QUICK else [pytest.mark.slow]
            found.append(pytest.param(beside, layout, marks=marks, id=f"{beside}, {layout}"))
    return found


class Runs:
    """Two steps of a feature, with a layout or in one process."""

    def __init__(self, tiny: Path, folder: Path, classifier: Path) -> None:
        self.folder, self.models = folder, {"dense": tiny / "model", "experts": folder / "experts"}
        self.names = {"tiny": tiny, "classifier": classifier}
        for name, rows in {"rows": TEXTS, "pairs": PAIRS}.items():
            self.names[name] = folder / f"{name}.jsonl"
            self.names[name].write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
        with_experts(tiny, self.models["experts"])
        self.alone: dict[tuple[str, str], Numbers] = {}
        self.count = 0

    def of_one(self, beside: str, model: str) -> Numbers:
        """Return the numbers of one process, computed once for all layouts."""
        if (beside, model) not in self.alone:
            self.alone[beside, model] = self.two_steps(beside, axes.Layout(1, (), model))
        return self.alone[beside, model]

    def two_steps(self, beside: str, layout: Any) -> Numbers:
        what, model = axes.BESIDE[beside], self.models[layout.model]
        self.count += 1
        folder = self.folder / str(self.count)
        steps = ["trainer.backend=local", "trainer.total_training_steps=2"]
        if what.recipe != "async":
            steps.append(f"trainer.n_gpus_per_node={layout.num_ranks}")
        if what.recipe in ("ppo", "async"):
            policy = "actor_rollout_ref"
            steps += [f"{policy}.model.path={model}", f"{policy}.actor.use_kl_loss=true"]
            steps += [f"critic.model.path={model}"]
            steps += ["placement=colocate"] if what.recipe == "ppo" else []
            steps = overrides(self.names["tiny"], folder, *steps)
        else:
            steps += [f"model.path={model}", f"trainer.default_local_dir={folder}", *ON_ROWS]
        over_axes = [f"{s}.parallel.{a}".lstrip(".") for s in what.sections for a in layout.axes]
        names = {**self.names, "model": model, "num_ranks": layout.num_ranks}
        own = [setting.format(**names) for setting in what.settings]
        run(load_config([*steps, *over_axes, *own], RECIPES[what.recipe]))
        return numbers(folder)


@pytest.fixture(scope="module")
def runs(tiny_dir: Path, classifier: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tiny_dir, tmp_path_factory.mktemp("together"), classifier)


@pytest.mark.parametrize(("beside", "layout"), cells())
def test_a_layout_beside_all_else_follows_one_process_or_is_refused(
    beside: str, layout: str, runs: Runs
) -> None:
    over_ranks = axes.LAYOUTS[layout]
    if words := axes.refusal(beside, layout):
        with pytest.raises(ConfigError, match=re.escape(words)):
            runs.two_steps(beside, over_ranks)
        return
    found, expected = runs.two_steps(beside, over_ranks), runs.of_one(beside, over_ranks.model)
    num_updates = 0
    for own, alone in zip(found, expected, strict=True):
        shared = {name for name in alone.keys() & own.keys() if "seqlen" not in name}
        num_updates += any(name.endswith("grad_norm") for name in shared)
        for name in sorted(shared):
            if not name.startswith(OF_THE_CLOCK):
                assert own[name] == pytest.approx(alone[name], rel=1e-4, abs=1e-5), name
    assert num_updates == 2
