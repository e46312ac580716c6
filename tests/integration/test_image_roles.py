"""The other roles and recipes over rows with images: critic, reference, reward model, teacher."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.runs import lines, numbers
from tests.integration.test_images import overrides, write_rows
from tests.workers.models.architectures import build_tiny, tiny_model_config
from tests.workers.models.vision import write_model
from trainer import load_config, run
from trainer.config.checks import check_class_of, check_reads_images
from trainer.preference.recipe import DPO
from trainer.preference.step import PreferenceTrainer
from trainer.reward_model.recipe import REWARD_MODEL
from trainer.reward_model.step import RewardModelTrainer
from verl_like.errors import ConfigError
from workers.config import ModelConfig
from workers.models.images import image_reader
from workers.training.role_model_spec import RoleModelSpec

ROLES = (
    "algorithm.adv_estimator=gae",
    "algorithm.use_kl_in_reward=true",
    "critic.optim.lr=1e-3",
    "trainer.n_gpus_per_node=1",
)
SPLIT = ("placement=split", "trainer.n_gpus_per_node=2")
PADDED = "actor_rollout_ref.model.use_remove_padding=false"
ONLY_REWARD_MODEL = ("reward.model.enable=true", "reward.function.weight=0")
LAYOUTS = {"plain": (), "padded": ("model.use_remove_padding=false",)}
"""Name of a run on pairs -> its settings."""


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return write_rows(tmp_path)


def write_pairs(rows: Path) -> Path:
    """Write the rows of `rows` with a good and a bad answer."""
    pairs = [json.loads(line) for line in rows.read_text().splitlines()]
    for number, pair in enumerate(pairs):
        del pair["messages"]
        pair["chosen"] = [{"role": "assistant", "content": "abc"[: number % 3 + 1]}]
        pair["rejected"] = [{"role": "assistant", "content": "no" * (number % 2 + 1)}]
    path = rows.with_name("pairs.jsonl")
    path.write_text("\n".join(map(json.dumps, pairs)), encoding="utf-8")
    return path


def on_pairs(model: Path, pairs: Path, folder: Path, *more: str) -> list[str]:
    return [
        *(f"model.path={model}", f"data.train_files={pairs}", "data.max_length=200"),
        *("data.train_batch_size=8", "optim.lr=1e-3", "trainer.total_training_steps=2"),
        *("trainer.backend=local", "trainer.logger=[]", f"trainer.default_local_dir={folder}"),
        *more,
    ]


def by_hand(model: Path, pairs: Path) -> Any:
    """Return the sums of log-probs [pairs, 2] as transformers' class computes them."""
    from transformers import AutoModelForImageTextToText

    from trainer.data.pairs import read_pairs
    from trainer.data.prompts import load_tokenizer
    from workers.images import ImageRef
    from workers.models.images import ImageReader

    module = AutoModelForImageTextToText.from_pretrained(model).eval()
    reader = ImageReader(str(model))
    sums = []
    for pair in read_pairs("", str(pairs), load_tokenizer(str(model)), 200):
        for side in (pair.chosen, pair.rejected):
            ids = torch.from_numpy(side.ids)[None]
            refs = [ImageRef(*ref) for ref in side.images]
            inputs = reader.inputs(refs) if refs else {}
            inputs["mm_token_type_ids"] = (ids == reader.token_id).int()
            with torch.no_grad():
                logits = module(input_ids=ids, **inputs).logits[0, :-1]
            chosen = logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
            sums.append(float(chosen[torch.from_numpy(side.in_loss[1:])].double().sum()))
    return torch.tensor(sums).view(-1, 2)


@pytest.mark.long
@pytest.mark.parametrize("family", ["qwen2_vl", "gemma3"])
def test_critic_and_reference_read_images(family: str, rows: Path, tmp_path: Path) -> None:
    model = write_model(family, tmp_path / "model")
    results = {}
    engine = "native" if family == "qwen2_vl" else "hf"
    for name, more in {"plain": (), "padded": (PADDED,), "split": SPLIT}.items():
        settings = overrides(rows, model, tmp_path / name, *ROLES, *more)
        run(load_config([*settings, f"actor_rollout_ref.rollout.name={engine}"]))
        results[name] = numbers(tmp_path / name)
        for step in results[name]:
            assert step["critic/grad_norm"] > 0
    assert results["split"] == results["plain"]
    for ours, theirs in zip(results["padded"], results["plain"], strict=True):
        for key in ("critic/grad_norm", "actor/grad_norm", "critic/vf_loss"):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-4), key


@pytest.mark.parametrize(
    ("key", "more"),
    [
        ("critic.model.path", ("algorithm.adv_estimator=gae",)),
        ("distillation.teacher_model.model_path", ()),
        ("reward.model.path", ONLY_REWARD_MODEL),
    ],
)
def test_a_role_without_eyes_is_rejected_by_its_key(
    key: str, more: tuple[str, ...], tiny_dir: Path, rows: Path, tmp_path: Path
) -> None:
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoTokenizer,
    )

    model = write_model("qwen2_vl", tmp_path / "model")
    text = tmp_path / "text"
    tokenizer = AutoTokenizer.from_pretrained(model)
    sizes = AutoConfig.from_pretrained(tiny_dir / "model")
    sizes.vocab_size, sizes.pad_token_id, sizes.eos_token_id = 160, 0, 1
    cls = AutoModelForCausalLM
    if key == "reward.model.path":
        sizes.num_labels, cls = 1, AutoModelForSequenceClassification
    cls.from_config(sizes).save_pretrained(text)
    tokenizer.save_pretrained(text)
    settings = overrides(rows, model, tmp_path / "run", *more, f"{key}={text}")
    with pytest.raises(ConfigError, match=f"{key}=.* does not read images"):
        run(load_config(settings))


def test_a_critic_whose_base_model_reads_no_images_is_rejected(tmp_path: Path) -> None:
    build_tiny(tiny_model_config("llama4")).save_pretrained(tmp_path)
    spec = RoleModelSpec("critic.model.path", ModelConfig(path=str(tmp_path)), head="scalar")
    with pytest.raises(ConfigError, match="the base model of 'llama4' does not read images"):
        check_reads_images({"critic": spec})
    check_reads_images({"actor": replace(spec, head="token")})


def test_a_class_whose_images_are_not_proved_is_rejected_before_models_load(
    tmp_path: Path,
) -> None:
    """PaliGemma attends to later tokens of a prompt, so its answer in a pass would be a prompt."""
    model = write_model("paligemma", tmp_path / "model")
    spec = RoleModelSpec("actor_rollout_ref.model.path", ModelConfig(path=str(model)))
    words = "images were not proved to be right for PaliGemmaForConditionalGeneration"
    with pytest.raises(ConfigError, match=f"role 'actor': .*model.path=.*{words}"):
        check_reads_images({"actor": spec})
    with pytest.raises(ConfigError, match=words):
        image_reader(str(model))


def test_a_class_that_is_right_with_eager_attention_passes_the_check_with_it(
    tmp_path: Path,
) -> None:
    build_tiny(tiny_model_config("paligemma")).save_pretrained(tmp_path)
    model = ModelConfig(path=str(tmp_path))
    with pytest.raises(ConfigError, match="Set attn_implementation=eager in the model's section"):
        check_class_of("actor", RoleModelSpec("actor_rollout_ref.model.path", model))
    eager = replace(model, attn_implementation="eager")
    check_class_of("actor", RoleModelSpec("actor_rollout_ref.model.path", eager))


@pytest.mark.parametrize(("axis", "words"), [("sp", "images"), ("pp", "split into stages")])
def test_axes_that_split_rows_or_layers_are_rejected(
    axis: str, words: str, rows: Path, tmp_path: Path
) -> None:
    model = write_model("qwen2_vl", tmp_path / "model")
    more = ("trainer.n_gpus_per_node=2", f"parallel.{axis}=2")
    with pytest.raises(ConfigError, match=f"parallel.{axis}=2.*{words}"):
        run(load_config(overrides(rows, model, tmp_path / "run", *more)))


def test_dpo_has_the_numbers_of_transformers(rows: Path, tmp_path: Path) -> None:
    model, pairs = write_model("qwen2_vl", tmp_path / "model"), write_pairs(rows)
    before = by_hand(model, pairs)
    results = {}
    for name, more in LAYOUTS.items():
        settings = on_pairs(model, pairs, tmp_path / name, f"data.val_files={pairs}", *more)
        run(load_config([*settings, "trainer.test_freq=2"], DPO), PreferenceTrainer)
        after = by_hand(tmp_path / name / "model", pairs)
        last = [line for line in lines(tmp_path / name) if "val/loss" in line][-1]
        gaps = 0.1 * (after - before).diff(dim=1).neg()
        assert last["val/loss"] == pytest.approx(
            float(-torch.nn.functional.logsigmoid(gaps).mean()), abs=1e-5
        )
        results[name] = [line for line in lines(tmp_path / name) if "train/loss" in line]
    for ours, theirs in zip(results["padded"], results["plain"], strict=True):
        assert ours["train/grad_norm"] == pytest.approx(theirs["train/grad_norm"], rel=1e-4)
        assert ours["train/loss"] == pytest.approx(theirs["train/loss"], abs=1e-6)


def test_kto_reads_images(rows: Path, tmp_path: Path) -> None:
    model, pairs = write_model("qwen2_vl", tmp_path / "model"), write_pairs(rows)
    results = {}
    for name, more in LAYOUTS.items():
        settings = on_pairs(model, pairs, tmp_path / name, "loss=kto", *more)
        run(load_config(settings, DPO), PreferenceTrainer)
        results[name] = [line for line in lines(tmp_path / name) if "train/loss" in line]
    for ours, theirs in zip(results["padded"], results["plain"], strict=True):
        assert ours["train/loss"] == pytest.approx(theirs["train/loss"], abs=1e-6)
        assert ours["train/kl/row"] == pytest.approx(theirs["train/kl/row"], abs=1e-4)


@pytest.mark.long
def test_a_trained_reward_model_scores_rows_with_images(rows: Path, tmp_path: Path) -> None:
    model, pairs = write_model("qwen2_vl", tmp_path / "model"), write_pairs(rows)
    settings = on_pairs(model, pairs, tmp_path / "rm", "trainer.total_training_steps=6")
    run(load_config(settings, REWARD_MODEL), RewardModelTrainer)
    losses = [step["train/loss"] for step in lines(tmp_path / "rm")]
    assert losses[-1] < losses[0], "it learns"
    teacher = write_model("qwen2_vl", tmp_path / "teacher", 1)
    scored = (f"reward.model.path={tmp_path}/rm/model", *ONLY_REWARD_MODEL)
    taught = f"distillation.teacher_model.model_path={teacher}"
    run(load_config(overrides(rows, model, tmp_path / "run", *scored, taught)))
    for step in lines(tmp_path / "run"):
        assert step["actor/grad_norm"] > 0
        assert step["critic/score/max"] > step["critic/score/min"]


def test_ptx_rows_have_images(rows: Path, tmp_path: Path) -> None:
    model = write_model("qwen2_vl", tmp_path / "model")
    more = (f"ptx.train_files={rows}", "ptx.coef=0.1", "ptx.max_length=168")
    run(load_config(overrides(rows, model, tmp_path / "run", *more)))
    for step in lines(tmp_path / "run"):
        assert step["actor/grad_norm"] > 0
