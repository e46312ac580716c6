"""Runs over rows with images: equal numbers over engines, layouts, placements and resumes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.integration.runs import lines, numbers
from tests.workers.models.vision import picture, write_model
from trainer import load_config, run
from trainer.ppo.stages import PPOTrainer
from trainer.run_folder.saved_model import find_saved_model
from trainer.sft.recipe import SFT
from trainer.sft.step import SFTTrainer

SIZES = ((40, 70), (90, 30), (33, 33))
REWARD = """
def score(response, images):
    return sum(image.size[0] for image in images) / 100 + sum(map(ord, response)) % 7
"""


def write_rows(folder: Path) -> Path:
    """Write rows with 1, 2 and no images, and the pictures; return the file."""
    for number, size in enumerate(SIZES):
        picture(*size, seed=number).save(folder / f"{number}.png")
    rows: list[dict[str, Any]] = [
        {"images": [f"{number % 3}.png"] * (number % 3 > 0) + ["2.png"] * (number % 3 > 1)}
        for number in range(8)
    ]
    for number, row in enumerate(rows):
        text = "<image>" * len(row["images"]) + f"What is {number}?"
        row |= {"prompt": [{"role": "user", "content": text}]}
        row["messages"] = [
            *row["prompt"],
            {"role": "assistant", "content": "abc"[: number % 3 + 1]},
        ]
    path = folder / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")
    return path


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return write_rows(tmp_path)


def overrides(rows: Path, model: Path, folder: Path, *more: str) -> list[str]:
    return [
        f"actor_rollout_ref.model.path={model}",
        f"data.train_files={rows}",
        f"reward.function.path={rows.parent}/reward.py",
        "reward.function.name=score",
        f"trainer.default_local_dir={folder}",
        "trainer.backend=local",
        *("data.train_batch_size=4", "data.max_prompt_length=160", "data.max_response_length=8"),
        *("actor_rollout_ref.actor.ppo_mini_batch_size=2", "actor_rollout_ref.rollout.n=2"),
        *("actor_rollout_ref.actor.optim.lr=1e-3", "algorithm.adv_estimator=grpo"),
        *("trainer.total_training_steps=2", "trainer.logger=[]"),
        *more,
    ]


@pytest.mark.parametrize(
    ("family", "engine"),
    [
        *(("qwen2_vl", "native"), ("qwen3_vl", "hf"), ("gemma3", "hf"), ("qwen3_5", "hf")),
        *(("internvl", "native"), ("smolvlm", "native")),
    ],
)
def test_the_rollout_has_the_log_probs_of_the_trainer(
    family: str, engine: str, rows: Path, tmp_path: Path
) -> None:
    model = write_model(family, tmp_path / "model")
    settings = overrides(rows, model, tmp_path / "run", f"actor_rollout_ref.rollout.name={engine}")
    run(load_config(settings))
    first, second = lines(tmp_path / "run")
    for step in (first, second):
        assert step["training/rollout_probs_diff_max"] < 2e-5
        assert step["actor/grad_norm"] > 0
    sample = json.loads((tmp_path / "run/rollouts/1.jsonl").read_text().splitlines()[0])
    assert sample["score"] >= 0


def test_ranks_that_split_matrices_cut_the_same_passes(rows: Path, tmp_path: Path) -> None:
    """Each rank has generated after other images, so its reader has met them in another order."""
    model = write_model("qwen2_vl", tmp_path / "model")
    more = ("trainer.n_gpus_per_node=2", "parallel.tp=2", "actor_rollout_ref.rollout.name=native")
    run(load_config(overrides(rows, model, tmp_path / "run", *more)))
    for step in lines(tmp_path / "run"):
        assert step["training/rollout_probs_diff_max"] < 2e-5


@pytest.mark.long
def test_a_resumed_run_and_packed_rows_have_the_numbers_of_a_plain_run(
    rows: Path, tmp_path: Path
) -> None:
    model = write_model("qwen2_vl", tmp_path / "model")
    plain = overrides(rows, model, tmp_path / "plain", "trainer.total_training_steps=3")
    run(load_config(plain))
    parts = overrides(rows, model, tmp_path / "parts", "trainer.save_freq=1")
    run(load_config([*parts, "trainer.total_training_steps=1"]))
    run(load_config([*parts, "trainer.total_training_steps=3"]))
    assert numbers(tmp_path / "parts") == numbers(tmp_path / "plain")

    padded = overrides(
        rows, model, tmp_path / "padded", "actor_rollout_ref.model.use_remove_padding=false"
    )
    run(load_config(padded))
    for ours, theirs in zip(lines(tmp_path / "padded"), lines(tmp_path / "plain"), strict=False):
        assert ours["actor/grad_norm"] == pytest.approx(theirs["actor/grad_norm"], rel=1e-4)


def test_a_step_with_images_is_replayed_bit_for_bit(rows: Path, tmp_path: Path) -> None:
    from trainer.tools.replay.replay import replay

    model = write_model("qwen2_vl", tmp_path / "model")
    more = ("trainer.save_freq=1", "trainer.batch_steps_to_keep=2", "trainer.n_gpus_per_node=1")
    run(load_config(overrides(rows, model, tmp_path / "run", *more)))
    assert not replay(tmp_path / "run", 2).differences
    assert not replay(tmp_path / "run", 2, stage="update").differences


def test_a_resume_with_another_image_processor_or_backend_is_rejected(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from verl_like.errors import CheckpointError

    model = write_model("qwen2_vl", tmp_path / "model")
    more = ("trainer.save_freq=1", "trainer.n_gpus_per_node=1")
    settings = overrides(rows, model, tmp_path / "run", *more)
    run(load_config([*settings, "trainer.total_training_steps=1"]))
    file = next(model.glob("*processor_config.json"))
    file.write_text(file.read_text() + " ", encoding="utf-8")
    with pytest.raises(CheckpointError, match="model has other contents now"):
        run(load_config(settings))
    file.write_text(file.read_text()[:-1], encoding="utf-8")

    (marker,) = (tmp_path / "run").glob("global_step_1/commit.json")
    backend = {"the backend of transformers' image processors": "pil"}
    assert json.loads(marker.read_text())["inputs"].items() >= backend.items()
    monkeypatch.setattr("trainer.run_folder.resume.IMAGE_BACKEND", "torchvision")
    with pytest.raises(CheckpointError, match="image processors was 'pil', is 'torchvision'"):
        run(load_config(settings))


def test_asynchronous_training_reads_images(rows: Path, tmp_path: Path) -> None:
    from trainer.async_training.recipe import ASYNC

    model = write_model("qwen2_vl", tmp_path / "model")
    settings = overrides(rows, model, tmp_path / "run", "trainer.n_gpus_per_node=2")
    run(load_config(settings, ASYNC))
    for step in lines(tmp_path / "run"):
        assert step["actor/grad_norm"] > 0


@pytest.mark.long
def test_two_ranks_have_the_numbers_of_one(rows: Path, tmp_path: Path) -> None:
    model = write_model("qwen2_5_vl", tmp_path / "model")
    for ranks in (1, 2):
        folder = tmp_path / f"ranks{ranks}"
        run(load_config(overrides(rows, model, folder, f"trainer.n_gpus_per_node={ranks}")))
    for one, two in zip(lines(tmp_path / "ranks1"), lines(tmp_path / "ranks2"), strict=True):
        assert two["actor/grad_norm"] == pytest.approx(one["actor/grad_norm"], rel=1e-3)
        assert two["critic/score/mean"] == one["critic/score/mean"]


@pytest.mark.ray
def test_ray_has_the_numbers_of_one_process(ray_session: None, rows: Path, tmp_path: Path) -> None:
    model = write_model("qwen2_vl", tmp_path / "model")
    for backend in ("local", "ray"):
        settings = overrides(rows, model, tmp_path / backend, "trainer.n_gpus_per_node=1")
        run(load_config([*settings, f"trainer.backend={backend}"]))
    assert numbers(tmp_path / "ray") == numbers(tmp_path / "local")


def test_sft_reads_images_and_its_model_loads_in_transformers(rows: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText

    model = write_model("internvl", tmp_path / "model")
    settings = [
        *(f"model.path={model}", f"data.train_files={rows}", "data.max_length=200"),
        *("data.train_batch_size=8", "optim.lr=1e-3", "trainer.total_epochs=3"),
        *(
            "trainer.backend=local",
            "trainer.logger=[]",
            f"trainer.default_local_dir={tmp_path}/run",
        ),
    ]
    run(load_config(settings, SFT), SFTTrainer)
    losses = [step["train/loss"] for step in lines(tmp_path / "run")]
    assert losses[-1] < losses[0]
    before = AutoModelForImageTextToText.from_pretrained(model)
    after = AutoModelForImageTextToText.from_pretrained(tmp_path / "run/model")
    same = {
        name: weight.equal(after.get_parameter(name)) for name, weight in before.named_parameters()
    }
    assert all(same[name] for name in same if "vision" in name), "the tower is frozen"
    assert not all(same.values())


def test_a_checkpoint_with_a_trained_tower_is_exported(rows: Path, tmp_path: Path) -> None:
    model = write_model("qwen2_5_vl", tmp_path / "model")
    tower = "actor_rollout_ref.model.freeze_vision_tower=false"
    settings = overrides(rows, model, tmp_path / "run", tower, "trainer.save_freq=1")
    run(load_config([*settings, "trainer.total_training_steps=1"]), PPOTrainer)
    find_saved_model(tmp_path / "run/global_step_1").export(tmp_path / "exported")
    trained = load_file(tmp_path / "exported/model.safetensors")
    before = load_file(model / "model.safetensors")
    assert trained.keys() == before.keys()
    changed = [name for name in before if not before[name].equal(trained[name].to(before[name]))]
    assert any("visual" in name for name in changed), "the tower is trained"


GAME = """
from verl_like import Environment, Observation, TrajectoryEnd

class Says(Environment):
    def step(self, text):
        self.turn = getattr(self, "turn", 0) + 1
        return Observation("more") if self.turn == 1 else TrajectoryEnd(1.0)
"""


@pytest.mark.long
@pytest.mark.parametrize("plays", [False, True])
def test_a_run_on_text_imports_nothing_for_images(
    plays: bool, tiny_dir: Path, tmp_path: Path
) -> None:
    from tests.integration.runs import POLICY_ALONE
    from tests.integration.runs import overrides as on_text

    settings = on_text(tiny_dir, tmp_path / "run", "trainer.backend=local", *POLICY_ALONE)
    if plays:
        (tmp_path / "game.py").write_text(GAME, encoding="utf-8")
        settings += [f"environment={tmp_path}/game.py:Says", "environment.max_tokens_per_turn=2"]
    code = (
        "import sys; from trainer import load_config, run; run(load_config(sys.argv[1:]));"
        "print([name for name in sys.modules if name.startswith(('workers', 'trainer')) "
        "and 'image' in name])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *settings, "trainer.total_training_steps=1"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_a_model_without_eyes_rejects_images(tiny_dir: Path, rows: Path, tmp_path: Path) -> None:
    from verl_like.errors import ConfigError

    settings = overrides(rows, tiny_dir / "model", tmp_path / "run")
    with pytest.raises(ConfigError, match="rows.jsonl, line 2: the model .* does not read images"):
        run(load_config(settings), PPOTrainer)
