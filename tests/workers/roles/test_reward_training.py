"""The worker that trains a reward model: its numbers, its folder, and loading the folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.workers.kept_ranks import run_kept
from tests.workers.samples import VOCAB, learned, own_chunk, random_row, started, tiny_config
from trainer.data.pairs import PairRow, pair_batch
from verl_like.batch.protocol import DataProto
from verl_like.errors import ConfigError
from workers.config import CheckpointConfig, OptimConfig, RewardModelConfig
from workers.config.rows import RewardModelTrainingConfig, RowDataConfig, TrainedModelConfig
from workers.losses.preference import REWARD_MODEL_LOSSES
from workers.roles.reward_model import RewardModelWorker
from workers.roles.rows import RewardModelTrainingWorker
from workers.training.engine import INPUTS

PAIRS = 5
Settings = Mapping[str, Any]
NONE: Settings = {}
TINY = {"vocab_size": VOCAB, "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32}
WIDTHS = {
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32, "max_position_embeddings": 64},
}


def pairs(extra_padding: int = 0) -> DataProto:
    generator = torch.Generator().manual_seed(3)
    side = partial(random_row, generator)
    rows = [PairRow(side(), side(), margin=0.25 * number) for number in range(PAIRS)]
    batch = pair_batch(rows, [f"pair {row}" for row in range(PAIRS)], pad_token_id=0)
    for name in ("input_ids", "attention_mask", "position_ids"):
        column = torch.nn.functional.pad(batch.batch[name], (0, extra_padding))
        batch.batch[name] = column
    return batch


def worker_of(path: Path, model: Settings = NONE, settings: Settings = NONE) -> Any:
    config = RewardModelTrainingConfig(
        model=TrainedModelConfig(path=str(path), **model),
        optim=OptimConfig(lr=1e-2),
        checkpoint=CheckpointConfig(save_contents=["model", "hf_model"]),
        **settings,
    )
    return started(RewardModelTrainingWorker, config, 10)


def trained(path: Path, model: Settings = NONE, settings: Settings = NONE) -> dict[str, Any]:
    worker = worker_of(path, model, settings)
    rows = own_chunk(pairs(), worker.rank, worker.world_size)
    metrics = [learned(worker.update_model(rows)) for _ in range(3)]
    scores = worker.compute_scores(rows).batch["scores"][: rows.num_real_rows]
    return {"metrics": metrics, "scores": scores}


def exported(worker: RewardModelTrainingWorker, folder: Path) -> Path:
    worker.save_checkpoint(str(folder))
    return folder / "huggingface"


def assert_same(results: dict[str, Any], expected: dict[str, Any]) -> None:
    for metrics, of_expected in zip(results["metrics"], expected["metrics"], strict=True):
        assert metrics == pytest.approx(of_expected, rel=1e-4, abs=1e-6)
    torch.testing.assert_close(results["scores"], expected["scores"], atol=1e-3, rtol=0)


@pytest.mark.parametrize("settings", [{"center_coef": 0.1}, {"score_at": "legacy_mean"}])
def test_passes_padding_and_gradient_checkpointing_do_not_change_an_update(
    settings: Settings, one_layer_dir: Path
) -> None:
    folder = one_layer_dir / "model"
    alone = trained(folder, NONE, settings)
    one_by_one = RowDataConfig(use_dynamic_bsz=False, micro_batch_size_per_gpu=1)
    assert_same(trained(folder, NONE, {**settings, "data": one_by_one}), alone)
    for name, value in (("use_remove_padding", False), ("enable_gradient_checkpointing", True)):
        assert_same(trained(folder, {name: value}, settings), alone)


CASES: list[tuple[Settings, Settings]] = [
    ({}, {"center_coef": 0.1}),
    ({"lora_rank": 4}, {"score_at": "legacy_mean", "loss": "log_exp"}),
    ({"strategy": "ddp", "use_remove_padding": False}, {}),
]


def train_all_cases(path: Path) -> list[dict[str, Any]]:
    return [trained(path, model, settings) for model, settings in CASES]


def test_two_ranks_train_like_one(one_layer_dir: Path) -> None:
    ranks = run_kept(2, train_all_cases, one_layer_dir / "model")
    for case, alone in enumerate(train_all_cases(one_layer_dir / "model")):
        scores = torch.cat([rank[case]["scores"] for rank in ranks])
        assert_same(ranks[0][case] | {"scores": scores}, alone)


def test_the_metrics_are_means_over_the_pairs(one_layer_dir: Path) -> None:
    worker = worker_of(one_layer_dir / "model")
    worker.update_model(pairs())
    scores = worker.compute_scores(pairs()).batch["scores"].double()
    metrics = worker.update_model(pairs())

    gaps = scores[:, 0] - scores[:, 1]
    losses = torch.nn.functional.softplus(pairs().batch["margin"].double() - gaps)
    expected = {
        "train/loss": losses.mean(),
        "train/accuracy": (gaps > 0).double().mean(),
        "train/margin": gaps.mean(),
        "train/chosen_score": scores[:, 0].mean(),
        "train/rejected_score": scores[:, 1].mean(),
    }
    shared = {name: metrics[name] for name in expected}
    assert shared == pytest.approx({k: float(v) for k, v in expected.items()}, rel=1e-5)


def test_a_loss_can_be_given_by_its_dotted_path(one_layer_dir: Path) -> None:
    path = "workers.losses.preference.compute_pairwise_loss_log_exp"
    worker = RewardModelTrainingWorker(RewardModelTrainingConfig(loss=path))
    assert worker.pairwise_loss is REWARD_MODEL_LOSSES["log_exp"]


def test_more_padding_does_not_change_a_score(one_layer_dir: Path) -> None:
    worker = worker_of(one_layer_dir / "model", {"use_remove_padding": False})
    worker.update_model(pairs())
    scores = worker.compute_scores(pairs()).batch["scores"]
    assert scores.abs().min() > 0
    assert torch.equal(worker.compute_scores(pairs(extra_padding=7)).batch["scores"], scores)


def scored_in_ppo(one_layer_dir: Path, path: Path) -> torch.Tensor:
    """Return [pairs, 2]: the scores of both sides as samples, by PPO's reward model."""
    config = tiny_config(one_layer_dir)
    config.reward.model = RewardModelConfig(enable=True, path=str(path))
    samples = DataProto.from_dict({name: pairs().padded(name).flatten(0, 1) for name in INPUTS})
    scored = started(RewardModelWorker, config).compute_rm_score(samples)
    return scored.batch["rm_scores"].sum(dim=1).view(-1, 2)


@pytest.mark.parametrize("score_at", ["last_token", "legacy_mean"])
def test_ppo_scores_by_the_exported_folder_as_training_does(
    score_at: str, one_layer_dir: Path, tmp_path: Path
) -> None:
    worker = worker_of(one_layer_dir / "model", settings={"score_at": score_at})
    worker.update_model(pairs())
    scores = worker.compute_scores(pairs()).batch["scores"]
    folder = exported(worker, tmp_path / "step")
    torch.testing.assert_close(scored_in_ppo(one_layer_dir, folder), scores, atol=1e-6, rtol=0)

    again = worker_of(folder)  # with its head and its score position
    torch.testing.assert_close(again.compute_scores(pairs()).batch["scores"], scores)


def test_a_folder_with_an_unknown_score_position_is_rejected(
    one_layer_dir: Path, tmp_path: Path
) -> None:
    folder = exported(worker_of(one_layer_dir / "model"), tmp_path / "step")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    text = json.dumps(config | {"score_at": "first_token"})
    (folder / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"score_at='first_token'; valid: last_token, legacy"):
        worker_of(folder)


def test_a_model_with_adapters_learns_and_is_exported_merged(
    one_layer_dir: Path, tmp_path: Path
) -> None:
    worker = worker_of(one_layer_dir / "model", {"lora_rank": 4})
    before = dict(worker.engine.named_full_tensors())
    losses = [worker.update_model(pairs())["train/loss"] for _ in range(6)]
    assert losses[-1] < losses[0] - 0.05
    trainable = [n for n, p in worker.engine.module.named_parameters() if p.requires_grad]
    assert all(".lora_" in name or name == "score.weight" for name in trainable)

    merged = dict(worker.engine.named_full_tensors())
    assert any(not torch.equal(before[name], merged[name]) for name in before if "q_proj" in name)
    scores = worker.compute_scores(pairs()).batch["scores"]
    folder = exported(worker, tmp_path / "step")
    torch.testing.assert_close(scored_in_ppo(one_layer_dir, folder), scores, atol=1e-5, rtol=0)


def test_peft_loads_the_adapter_and_the_head(one_layer_dir: Path, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification

    worker = worker_of(one_layer_dir / "model", {"lora_rank": 4})
    for _ in range(3):
        worker.update_model(pairs())
    worker.save_checkpoint(str(tmp_path / "step"))
    base = AutoModelForSequenceClassification.from_pretrained(one_layer_dir / "model", num_labels=1)
    model = PeftModel.from_pretrained(base, tmp_path / "step" / "lora_adapter").eval()

    scores = worker.compute_scores(pairs()).batch["scores"]
    for pair, ids in enumerate(pairs().batch["input_ids"][:, 0]):
        length = int(pairs().batch["attention_mask"][pair, 0].sum())
        with torch.no_grad():
            expected = float(model(input_ids=ids[None, :length]).logits)
        assert float(scores[pair, 0]) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"score.bias": torch.ones(1)}, "its head has score.bias, but a score is computed only"),
        (
            {"score.weight": None},
            "one label according to its config.json, .* have no score.weight of",
        ),
    ],
)
def test_a_folder_with_a_wrong_head_is_rejected(
    change: dict[str, torch.Tensor | None], problem: str, one_layer_dir: Path, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    folder = exported(worker_of(one_layer_dir / "model"), tmp_path / "step")
    tensors = load_file(folder / "model.safetensors") | change
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=problem):
        scored_in_ppo(one_layer_dir, folder)


@pytest.mark.parametrize("family", ["opt", "bloom"])
def test_a_model_family_learns_and_transformers_computes_the_same_scores(
    family: str, tmp_path: Path
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **TINY, **WIDTHS.get(family, {}))
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    worker = worker_of(tmp_path / "base")
    losses = [worker.update_model(pairs())["train/loss"] for _ in range(4)]
    assert losses[-1] < losses[0]

    scores = worker.compute_scores(pairs()).batch["scores"]
    folder = exported(worker, tmp_path / "step")
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    for pair, row in enumerate(pairs().batch["input_ids"]):
        for side, ids in enumerate(row):
            length = int(pairs().batch["attention_mask"][pair, side].sum())
            with torch.no_grad():
                expected = float(model(ids[None, :length]).logits)
            assert float(scores[pair, side]) == pytest.approx(expected, abs=1e-5)
