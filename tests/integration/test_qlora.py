"""Runs with a 4-bit base: GRPO and SFT, resumes, exports, and a vision-language model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.integration.runs import (
    POLICY_ALONE,
    lines,
    numbers,
    overrides,
    overrides_on_rows,
    write_jsonl,
)
from tests.integration.test_images import overrides as image_overrides
from tests.integration.test_images import write_rows
from tests.workers.models.vision import write_model
from trainer import load_config, run
from trainer.run_folder.saved_model import find_saved_model
from trainer.sft.recipe import SFT
from verl_like.errors import ConfigError

pytest.importorskip("bitsandbytes")

QLORA = ("lora_rank=4", "quantization=nf4")
POLICY = (
    *POLICY_ALONE,
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",  # one update per step
    *(f"actor_rollout_ref.model.{setting}" for setting in QLORA),
    "actor_rollout_ref.actor.use_kl_loss=true",
    "trainer.backend=local",
    "trainer.n_gpus_per_node=1",
    "trainer.save_freq=1",
)


def grpo(tiny: Path, folder: Path, steps: int) -> None:
    settings = overrides(tiny, folder, *POLICY, f"trainer.total_training_steps={steps}")
    run(load_config(settings))


def test_a_resumed_grpo_run_has_the_numbers_of_an_unbroken_run(
    tiny_dir: Path, tmp_path: Path
) -> None:
    unbroken, resumed = tmp_path / "unbroken", tmp_path / "resumed"
    grpo(tiny_dir, unbroken, 2)
    grpo(tiny_dir, resumed, 1)
    grpo(tiny_dir, resumed, 2)
    assert numbers(resumed) == numbers(unbroken)
    first, second = lines(unbroken)
    assert first["actor/kl_loss"] == pytest.approx(0, abs=1e-6)  # the reference has the same base
    for step in (first, second):
        assert step["actor/grad_norm"] > 0
        assert step["training/rollout_probs_diff_max"] < 1e-4

    # the exported model has dequantized base + adapter in floats
    out = tmp_path / "exported"
    find_saved_model(unbroken, in_checkpoint=True).export(out)
    exported = AutoModelForCausalLM.from_pretrained(out).state_dict()
    saved = AutoModelForCausalLM.from_pretrained(unbroken / "model").state_dict()
    base = AutoModelForCausalLM.from_pretrained(tiny_dir / "model").state_dict()
    for name, weight in saved.items():
        torch.testing.assert_close(exported[name], weight, rtol=0, atol=0)
        rounded = float((weight - base[name]).norm() / base[name].norm())
        assert (rounded > 0.05) == (".layers." in name and "norm" not in name), name


def test_a_4_bit_base_without_lora_is_rejected_before_the_run(
    tiny_dir: Path, tmp_path: Path
) -> None:
    quantized = "actor_rollout_ref.model.quantization=nf4"
    settings = overrides(tiny_dir, tmp_path / "run", *POLICY_ALONE, quantized)
    with pytest.raises(
        ConfigError, match="nf4 with .*lora_rank=0: 4-bit weights cannot be trained"
    ):
        run(load_config([*settings, "trainer.backend=local", "trainer.n_gpus_per_node=1"]))


def test_an_8_bit_base_is_rejected_in_words(tiny_dir: Path, tmp_path: Path) -> None:
    settings = overrides(tiny_dir, tmp_path / "run", *POLICY)
    with pytest.raises(ConfigError, match=r"nf4.*int8 is only for roles that are not trained"):
        load_config([*settings, "actor_rollout_ref.model.quantization=int8"])


def sft_losses(tiny: Path, folder: Path, *more: str) -> list[float]:
    rows = [{"prompt": f"say {letter}", "response": letter * 3} for letter in "abcdefghij"]
    files = {"train": write_jsonl(folder / "train.jsonl", rows)}
    qlora = (f"model.{setting}" for setting in QLORA)
    sizes = ("data.train_batch_size=4", "optim.lr=1e-2", "trainer.total_epochs=1")
    settings = overrides_on_rows(tiny, files, folder / "run", *qlora, *sizes, *more)
    run(load_config(settings, SFT))
    return [line["train/loss"] for line in lines(folder / "run")]


def test_an_epoch_of_sft_learns(tiny_dir: Path, tmp_path: Path) -> None:
    losses = sft_losses(tiny_dir, tmp_path)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_two_ranks_train_as_one(strategy: str, tiny_dir: Path, tmp_path: Path) -> None:
    folders = one, two = tmp_path / "one", tmp_path / "two"
    for folder in folders:
        folder.mkdir()
    ranks = ("trainer.n_gpus_per_node=2", "trainer.backend=local", f"model.strategy={strategy}")
    assert sft_losses(tiny_dir, two, *ranks) == pytest.approx(sft_losses(tiny_dir, one), abs=1e-6)
    trained = [AutoModelForCausalLM.from_pretrained(folder / "run/model") for folder in folders]
    for first, second in zip(*(model.parameters() for model in trained), strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=1e-5)


def test_the_language_half_of_a_vision_model_is_trained_on_images(tmp_path: Path) -> None:
    rows, model = write_rows(tmp_path), write_model("qwen2_vl", tmp_path / "model")
    settings = [f"actor_rollout_ref.model.{setting}" for setting in QLORA]
    settings.append("actor_rollout_ref.rollout.name=hf")  # gets merged weights by syncs
    run(load_config(image_overrides(rows, model, tmp_path / "run", *settings)))
    for step in lines(tmp_path / "run"):
        assert step["actor/grad_norm"] > 0
        assert step["training/rollout_probs_diff_max"] < 1e-4
