"""Train every algorithm on the tiny task and draw its curve: `python docs/make_curves.py`.

    python docs/make_curves.py                 all: presets, estimators, policy losses
    python docs/make_curves.py --missing       those that have no curve yet
    python docs/make_curves.py --only NAME …   those of these names

A run is the command `verl-like ppo` in this process, with the settings of the algorithm's card and
`TINY`. Scores go to `docs/data/curves.json` and the curves to `docs/images/curves.png`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from cards import (
    estimator_cards,
    left_to_the_user,
    policy_loss_cards,
    preset_leaves,
)

from trainer.ppo.recipe import PPO

DOCS = Path(__file__).resolve().parent
DATA = DOCS / "data" / "curves.json"
ALL_IN_ONE = DOCS / "images" / "curves.png"

NUM_STEPS = 20
LEAST_RISE = 0.02
"""By so much the last five steps' mean score is above that of the first five at least."""
KL_COEF = "algorithm.kl_ctrl.kl_coef"
TINY_KL_COEF = 0.001
"""Papers' coefficients are for the scores of reward models, tens of times those of this task."""
MINI_BATCH = "actor_rollout_ref.actor.ppo_mini_batch_size"
TINY = {
    "data.train_batch_size": 16,
    "data.max_prompt_length": 16,
    "data.max_response_length": 8,
    MINI_BATCH: 8,
    "actor_rollout_ref.actor.optim.lr": 3e-3,
    "actor_rollout_ref.rollout.n": 8,
    "reward.overlong_penalty.enable": "false",
    "trainer.total_training_steps": NUM_STEPS,
    "trainer.backend": "local",
    "trainer.logger": "[]",
}
"""Settings of every run. Its own mini-batch wins, of a preset too.

The task wants responses of full length, so that none of them is punished as overlong.
"""
KINDS = {"algorithm": "Preset", "estimator": "Estimator", "policy_loss": "Policy loss"}
"""Kind of an algorithm -> its word in the pictures."""


def runs() -> dict[tuple[str, str], list[str]]:
    """(kind, name) -> the settings that choose it."""
    PPO.load_registries()
    found: dict[tuple[str, str], list[str]] = {}
    for preset in PPO.preset_names("algorithm"):
        own = preset_leaves("algorithm", preset)
        if left_to_the_user("algorithm", preset):
            continue  # the tiny task has no such model
        settings = [f"algorithm={preset}"]
        if MINI_BATCH in own:
            settings.append(f"{MINI_BATCH}={own[MINI_BATCH]}")
        if KL_COEF in own:
            settings.append(f"{KL_COEF}={TINY_KL_COEF}")
        found["algorithm", preset] = settings
    for kind, cards in (("estimator", estimator_cards()), ("policy_loss", policy_loss_cards())):
        for card in sorted(cards, key=lambda card: card.names):
            found[kind, card.names[0]] = list(card.settings)
    return found


def train(settings: list[str], tiny: Path, folder: Path) -> list[float]:
    """The mean score of every step of a tiny run of these settings; `folder` is its run folder."""
    from trainer.cli.main import main as verl_like

    own = {setting.partition("=")[0] for setting in settings}
    base = [f"{key}={value}" for key, value in TINY.items() if key not in own]
    base += [
        f"actor_rollout_ref.model.path={tiny}/model",
        f"data.train_files={tiny}/train.parquet",
        f"trainer.default_local_dir={folder}",
    ]
    with mock.patch.object(sys, "argv", ["verl-like", "ppo", *settings, *base]):
        verl_like()
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["critic/score/mean"] for line in lines]


def first_and_last(scores: list[float]) -> tuple[float, float]:
    """The mean of the first five steps and of the last five."""
    return sum(scores[:5]) / 5, sum(scores[-5:]) / 5


def id_of(kind: str, name: str) -> str:
    """Its key in the data."""
    return f"{kind}/{name}"


def read_scores() -> dict[str, list[float]]:
    """The scores that have been written, by `id_of`."""
    scores: dict[str, list[float]] = json.loads(DATA.read_text("utf-8")) if DATA.exists() else {}
    return scores


def write_scores(scores: dict[str, list[float]]) -> None:
    """A line for each run, to four places."""
    DATA.parent.mkdir(exist_ok=True)
    lines = []
    for key in sorted(scores):
        lines.append(f"  {json.dumps(key)}: {json.dumps([round(s, 4) for s in scores[key]])}")
    DATA.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def draw_all(names: list[tuple[str, str]], scores: dict[str, list[float]]) -> None:
    """A small panel for each, on the same axes."""
    num_columns = 7
    num_rows = -(-len(names) // num_columns)
    with figure(ALL_IN_ONE, (11.5, 1.2 * num_rows), dpi=95) as drawn:
        panels = drawn.subplots(num_rows, num_columns, sharex=True, sharey=True).ravel()
        for panel in panels:
            panel.set_axis_off()
        for panel, (kind, name) in zip(panels, names, strict=False):
            panel.set_axis_on()
            _curve(panel, scores[id_of(kind, name)], scores)
            panel.set_title(f"{name}\n{KINDS[kind].lower()}", fontsize=6, pad=2)


def _curve(axes: Any, own: list[float], scores: dict[str, list[float]]) -> None:
    axes.plot(range(1, NUM_STEPS + 1), own, color="#1f5fbf", linewidth=1.6)
    highest = max(max(curve) for curve in scores.values())
    lowest = min(min(curve) for curve in scores.values())
    axes.set_ylim(lowest - 0.02, highest + 0.02)
    axes.set_xticks([1, NUM_STEPS // 2, NUM_STEPS])
    axes.tick_params(labelsize=6.5)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


@contextlib.contextmanager
def figure(path: Path, inches: tuple[float, float], dpi: int) -> Iterator[Any]:
    """A figure that becomes a PNG of few colors, and so of few bytes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from PIL import Image

    drawn = Figure(figsize=inches, dpi=dpi, layout="constrained")
    yield drawn
    buffer = io.BytesIO()
    FigureCanvasAgg(drawn).print_png(buffer)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.open(buffer).convert("RGB").quantize(16).save(path, optimize=True)


def make_tiny(folder: Path) -> Path:
    """Model and data of `verl-like make-tiny`."""
    source = DOCS.parent / "examples" / "tiny" / "make.py"
    spec = importlib.util.spec_from_file_location("tiny", source)
    assert spec is not None, f"{source} is there"
    assert spec.loader is not None, "a path that ends in .py always has a loader"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made: Path = module.make(folder)
    return made


def main() -> None:
    """Train the algorithms that the arguments name, then draw all curves."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", help="names of algorithms or presets")
    parser.add_argument("--missing", action="store_true", help="those that have no curve yet")
    arguments = parser.parse_args()

    every, scores = runs(), read_scores()
    known = {id_of(*which) for which in every}
    names = sorted({name for _, name in every})
    for name in arguments.only or []:
        if name not in names:
            parser.error(f"no algorithm {name!r}; there are {', '.join(names)}.")
    scores = {key: value for key, value in scores.items() if key in known}
    with tempfile.TemporaryDirectory() as folder:
        tiny = make_tiny(Path(folder) / "tiny")
        for (kind, name), settings in every.items():
            is_left_out = arguments.only and name not in arguments.only
            is_there = arguments.missing and id_of(kind, name) in scores
            if is_left_out or is_there:
                continue
            with contextlib.redirect_stdout(io.StringIO()):
                curve = train(settings, tiny, Path(folder) / f"{kind}-{name}")
            scores[id_of(kind, name)] = curve
            write_scores(scores)
            first, last = first_and_last(curve)
            print(f"{KINDS[kind]} {name}: {first:.3f} -> {last:.3f}", flush=True)

    drawn = [which for which in every if id_of(*which) in scores]
    draw_all(drawn, scores)


if __name__ == "__main__":
    main()
