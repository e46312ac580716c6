"""Runs whose environments and agents show images: numbers, replays, samples, evaluation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration import test_images
from tests.integration.runs import lines, numbers
from tests.workers.models.vision import picture, write_model
from trainer import load_config, run
from trainer.cli import eval as evaluation
from trainer.tools.replay.replay import replay
from verl_like.errors import ConfigError

GAME = """
from pathlib import Path
from PIL import Image
from verl_like import Environment, Observation, TrajectoryEnd

class Looks(Environment):
    def __init__(self, folder):
        self.folder = Path(folder)

    def reset(self, row, rng):
        self.number, self.turn = row["extra_info"]["number"], 0
        return Observation("<image>is it?", images=self._shown(1)) if self.number % 2 else "go"

    def _shown(self, count):
        names = [f"{(self.number + n) % 3}.png" for n in range(count)]
        opened = Image.open(self.folder / names[-1]) if names else None
        return [*(self.folder / name for name in names[:-1]), *([opened] if opened else [])]

    def step(self, text):
        self.turn += 1
        if self.turn == 3:
            return TrajectoryEnd(sum(map(ord, text)) % 5)
        return Observation("and now?", images=self._shown((self.number + self.turn) % 3))
"""


def environment_of(folder: Path) -> list[str]:
    for number, size in enumerate(test_images.SIZES):
        picture(*size, seed=number).save(folder / f"{number}.png")
    (folder / "game.py").write_text(GAME, encoding="utf-8")
    rows = [{"prompt": "a", "extra_info": {"number": number}} for number in range(8)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return [
        f"environment={folder}/game.py:Looks",
        f"environment.kwargs.folder={folder}",
        "environment.max_tokens_per_turn=5",
        "data.max_response_length=160",
    ]


def overrides(folder: Path, model: Path, *more: str) -> list[str]:
    settings = test_images.overrides(folder / "rows.jsonl", model, folder / "run")
    return [*(s for s in settings if not s.startswith("reward.")), *environment_of(folder), *more]


@pytest.mark.long
@pytest.mark.parametrize(("family", "engine"), [("qwen2_vl", "native"), ("gemma3", "hf")])
def test_a_run_whose_environment_shows_images_has_equal_log_probs_and_a_replay(
    family: str, engine: str, tmp_path: Path
) -> None:
    model = write_model(family, tmp_path / "model")
    more = (
        *("environment.images=true", f"actor_rollout_ref.rollout.name={engine}"),
        *("trainer.save_freq=1", "trainer.batch_steps_to_keep=2", "trainer.n_gpus_per_node=1"),
        f"data.val_files={tmp_path}/rows.jsonl",
    )
    result = run(load_config(overrides(tmp_path, model, *more)))
    steps = [step for step in lines(tmp_path / "run") if "actor/grad_norm" in step]
    assert len(steps) == 2
    for step in steps:
        assert step["training/rollout_probs_diff_max"] < 2e-5
        assert step["training/num_hash_matched_samples"] == 8
        assert step["actor/grad_norm"] > 0
    counts = {len(sample["images"]) for sample in result.samples()}
    assert counts >= {2, 3} or counts >= {3, 4}
    assert any(
        turn["text"].startswith("<image>and now?")
        for sample in result.samples()
        for turn in sample["turns"]
    )
    assert 'src="data:image/jpeg' in result.report.read_text(encoding="utf-8")
    assert not replay(tmp_path / "run", 2).differences
    assert not replay(tmp_path / "run", 2, stage="update").differences
    if engine == "native":
        evaluation.main([str(tmp_path / "run")])


@pytest.mark.long
@pytest.mark.parametrize("way", ["two ranks", "async"])
def test_ranks_and_generators_train_on_images_of_environments(way: str, tmp_path: Path) -> None:
    from trainer.async_training.recipe import ASYNC

    model = write_model("qwen2_vl", tmp_path / "model")
    more = "environment.images=true", "trainer.n_gpus_per_node=2"
    settings = overrides(tmp_path, model, *more)
    run(load_config(settings, ASYNC) if way == "async" else load_config(settings))
    steps = [step for step in lines(tmp_path / "run") if "actor/grad_norm" in step]
    assert len(steps) == 2
    for step in steps:
        assert step["training/num_hash_matched_samples"] == 8
        assert step["actor/grad_norm"] > 0


@pytest.mark.long
@pytest.mark.ray
def test_ray_has_the_numbers_of_local_processes(ray_session: None, tmp_path: Path) -> None:
    model, steps = write_model("qwen2_vl", tmp_path / "model"), {}
    for backend in ("local", "ray"):
        (folder := tmp_path / backend).mkdir()
        more = "environment.images=true", "trainer.n_gpus_per_node=2"
        run(load_config(overrides(folder, model, *more, f"trainer.backend={backend}")))
        steps[backend] = [
            {name: value for name, value in step.items() if name.startswith(("actor", "training"))}
            for step in numbers(folder / "run")
        ]
    assert steps["ray"] == steps["local"]
    assert "actor/grad_norm" in steps["ray"][0]


def test_an_environment_of_texts_continues_prompts_with_images(tmp_path: Path) -> None:
    """The rows have images, so the key is not needed; the first observation joins the prompt."""
    rows = test_images.write_rows(tmp_path)
    (tmp_path / "says.py").write_text(
        test_images.GAME.replace(
            "def step", "def reset(self):\n        return 'go'\n\n    def step"
        )
    )
    model = write_model("qwen2_vl", tmp_path / "model")
    more = (
        f"environment={tmp_path}/says.py:Says",
        *("environment.max_tokens_per_turn=5", "data.max_response_length=64"),
    )
    result = run(load_config(test_images.overrides(rows, model, tmp_path / "run", *more)))
    for step in lines(tmp_path / "run"):
        assert step["training/rollout_probs_diff_max"] < 2e-5
    expected = {0: 0, 1: 1, 2: 2}
    for sample in result.samples():
        number = int(sample["uid"].partition("-")[0])
        assert len(sample["images"]) == expected[number % 3]
        assert sample["input"].endswith("\ngo")


def test_a_text_model_or_images_without_the_key_are_rejected(
    tmp_path: Path, tiny_dir: Path
) -> None:
    settings = overrides(tmp_path, tiny_dir / "model", "environment.images=true")
    with pytest.raises(ConfigError, match="does not read images.*environment.images=true"):
        run(load_config(settings))
    model = write_model("qwen2_vl", tmp_path / "model")
    words = "turn [12] of uid .* sample .*Set environment.images=true"
    with pytest.raises(Exception, match=words):
        run(load_config(overrides(tmp_path, model)))
