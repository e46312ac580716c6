"""A reward model of the tiny model: learning, evaluation, resumes and errors."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from tests.integration.runs import numbers, overrides, overrides_on_rows, write_jsonl
from trainer import run
from trainer.config.compose import load_config
from trainer.data.pairs import read_pairs
from trainer.data.prompts import load_tokenizer
from trainer.ppo.recipe import PPO
from trainer.reward_model.recipe import REWARD_MODEL
from verl_like.errors import ConfigError
from workers.losses.preference import REWARD_MODEL_LOSSES, compute_reward_loss


def letters(number: int, seed: int) -> list[dict[str, object]]:
    """Separable pairs: the chosen response has a and b, the rejected one c and d."""
    draw = random.Random(seed)
    rows = []
    for _ in range(number):
        chosen, rejected = (
            "".join(draw.choices(alphabet, k=draw.randint(2, 5))) for alphabet in ("ab", "cd")
        )
        rows.append({"prompt": "say a or b", "chosen": chosen, "rejected": rejected})
    return rows


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pairs")
    with_margin = [row | {"margin": 0.5 * (n % 3)} for n, row in enumerate(letters(7, 1))]
    return {
        "train": write_jsonl(folder / "train.jsonl", letters(10, 0)),
        "val": write_jsonl(folder / "val.jsonl", with_margin),
    }


def settings_of(tiny_dir: Path, files: dict[str, Path], folder: Path, *more: str) -> list[str]:
    short = ("data.train_batch_size=4", "trainer.total_epochs=2", "trainer.test_freq=5")
    learning = ("optim.lr=3e-3", "center_coef=0.01")
    return overrides_on_rows(tiny_dir, files, folder, *short, *learning, *more)


@pytest.fixture(scope="module")
def whole(tiny_dir: Path, files: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of two epochs of ten pairs, four per step."""
    folder = tmp_path_factory.mktemp("whole")
    saving = ("trainer.save_freq=3", "checkpoint.save_contents=[model,optimizer,extra,hf_model]")
    result = run(load_config(settings_of(tiny_dir, files, folder, *saving), REWARD_MODEL))
    assert result.model_folder == folder / "model"
    return folder


def test_the_loss_falls_and_every_pair_is_trained(whole: Path) -> None:
    steps = [line for line in numbers(whole) if "train/loss" in line]
    assert [line["training/epoch"] for line in steps] == [0, 0, 1, 1, 1]
    assert steps[0]["train/loss"] == pytest.approx(0.693147, abs=1e-6)
    assert steps[0]["train/accuracy"] == 0.5
    assert steps[-1]["train/loss"] < steps[0]["train/loss"]


def test_validation_metrics_equal_brute_force(
    whole: Path, tiny_dir: Path, files: dict[str, Path]
) -> None:
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(whole / "model").eval()
    tokenizer = load_tokenizer(str(tiny_dir / "model"))
    pairs = read_pairs("data.val_files", str(files["val"]), tokenizer, 32)
    scores = torch.zeros(len(pairs), 2, dtype=torch.float64)
    for number, pair in enumerate(pairs):
        for side, row in enumerate((pair.chosen, pair.rejected)):
            with torch.no_grad():
                scores[number, side] = float(model(torch.from_numpy(row.ids)[None]).logits)

    margins = torch.tensor([pair.margin for pair in pairs])
    losses = compute_reward_loss(REWARD_MODEL_LOSSES["log_exp"], scores, margins, 0.01)
    right = sum(float(chosen > rejected) for chosen, rejected in scores.tolist())
    last = [line for line in numbers(whole) if "val-core/rm/loss" in line][-1]
    assert last["val-core/rm/accuracy"] == pytest.approx(right / 7)
    assert last["val-core/rm/loss"] == pytest.approx(float(losses.mean()), abs=1e-5)
    margin = float((scores[:, 0] - scores[:, 1]).mean())
    assert last["val-aux/rm/margin"] == pytest.approx(margin, abs=1e-5)


def test_a_resumed_run_repeats_the_numbers(
    whole: Path, tiny_dir: Path, files: dict[str, Path], tmp_path: Path
) -> None:
    start = f"trainer.resume_from_path={whole}/global_step_3"
    settings = settings_of(tiny_dir, files, tmp_path, "trainer.resume_mode=resume_path", start)
    run(load_config(settings, REWARD_MODEL))
    assert numbers(tmp_path) == [line for line in numbers(whole) if line["step"] > 3]


def test_ppo_uses_the_model_as_reward_model_and_critic(
    whole: Path, tiny_dir: Path, tmp_path: Path
) -> None:
    folder = whole / "global_step_5" / "reward_model" / "huggingface"
    more = [
        "reward.model.enable=true",
        f"reward.model.path={folder}",
        "reward.function.weight=0",
        f"critic.model.path={folder}",
        "placement=split",
        "trainer.n_gpus_per_node=2",
        "trainer.backend=local",
        "trainer.total_training_steps=1",
        "algorithm.use_kl_in_reward=false",
    ]
    run(load_config(overrides(tiny_dir, tmp_path, *more), PPO))
    step = numbers(tmp_path)[0]
    assert step["critic/score/max"] != step["critic/score/min"]
    assert step["critic/values/max"] != step["critic/values/min"]  # values of zeros would be equal


def test_a_bad_pair_is_rejected_before_a_process_starts(
    tiny_dir: Path,
    files: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("trainer.launch.WorkerGroups", None)
    row: dict[str, object] = {"prompt": "say a", "chosen": "a"}
    bad = files | {"train": write_jsonl(tmp_path / "bad.jsonl", [*letters(1, 0), row])}
    settings = settings_of(tiny_dir, bad, tmp_path / "run")
    with pytest.raises(
        ConfigError, match="bad.jsonl, line 2: .*it has no 'rejected'.*on_bad_row=skip"
    ):
        run(load_config(settings, REWARD_MODEL))
    more = ("data.on_bad_row=skip", "trainer.dry_run=true")
    run(load_config([*settings, *more], REWARD_MODEL))
    assert "rows to train on: 1, to validate on: 7; steps: 1\n" in capsys.readouterr().out
