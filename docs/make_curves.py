"""Train every algorithm on the tiny task and draw its curve: `python docs/make_curves.py`.

    python docs/make_curves.py                 all: presets, estimators, policy losses
    python docs/make_curves.py --missing       those that have no curve yet
    python docs/make_curves.py --only NAME …   those of these names
    python docs/make_curves.py --only          none: draw the picture again

A run is the command `verl-like ppo` in this process, with the settings of the algorithm's card and
`TINY`. Scores go to `docs/data/curves.json`, and the curves of the presets to
`docs/images/curves.svg`, in gray and blue that can be read on a light and on a dark page.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import sys
import tempfile
from pathlib import Path
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
PICTURE = DOCS / "images" / "curves.svg"

NUM_STEPS, NUM_COLUMNS = 20, 6
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
"""Kind of an algorithm -> its word on the console."""


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


def draw(scores: dict[str, list[float]]) -> None:
    """Draw a small panel for each preset, on the same axes."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    names = [name for kind, name in runs() if kind == "algorithm"]
    gray = ("text.color", "axes.edgecolor", "xtick.color", "ytick.color")
    settings = {"svg.fonttype": "none", "svg.hashsalt": "curves"}
    with rc_context(settings | dict.fromkeys(gray, "#808080")):
        figure = Figure(figsize=(9.5, 1.25 * -(-len(names) // NUM_COLUMNS)), layout="constrained")
        shape = {"nrows": -(-len(names) // NUM_COLUMNS), "ncols": NUM_COLUMNS}
        panels = figure.subplots(**shape, sharex=True, sharey=True).ravel()
        for panel in panels[len(names) :]:
            panel.set_axis_off()
        for panel, name in zip(panels, names, strict=False):
            curve = scores[id_of("algorithm", name)]
            panel.plot(range(1, NUM_STEPS + 1), curve, color="#3d85d9", linewidth=1.6)
            panel.set_title(name, fontsize=7.5, pad=2)
            panel.set_facecolor("none")
            panel.set_xticks([1, NUM_STEPS])
            panel.tick_params(labelsize=6.5)
            panel.spines[["top", "right"]].set_visible(False)
        PICTURE.parent.mkdir(exist_ok=True)
        figure.savefig(PICTURE, transparent=True, metadata={"Date": None})


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
    parser.add_argument("--only", nargs="*", metavar="NAME", help="names of algorithms or presets")
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
            is_left_out = arguments.only is not None and name not in arguments.only
            is_there = arguments.missing and id_of(kind, name) in scores
            if is_left_out or is_there:
                continue
            with contextlib.redirect_stdout(io.StringIO()):
                curve = train(settings, tiny, Path(folder) / f"{kind}-{name}")
            scores[id_of(kind, name)] = curve
            write_scores(scores)
            first, last = first_and_last(curve)
            print(f"{KINDS[kind]} {name}: {first:.3f} -> {last:.3f}", flush=True)

    draw(scores)


if __name__ == "__main__":
    main()
