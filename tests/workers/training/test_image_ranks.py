"""Ranks with images in only some of their rows: whole updates of one process, tower included."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.workers.kept_ranks import process_set_back, run_kept
from tests.workers.models.vision import picture, write_model
from tests.workers.samples import learned, own_chunk, started, tiny_config, weights_of
from verl_like.batch.protocol import DataProto
from verl_like.batch.ragged import RaggedTensor
from workers.columns import IMAGES
from workers.config import ParallelConfig
from workers.images import ImageRef, image_ref
from workers.models.images import ImageReader
from workers.parallel import sharding
from workers.parallel.fsdp import full_tensor
from workers.roles.actor import ActorWorker
from workers.training.microbatch import MicroBatchBudget
from workers.training.passes.lm_head import TokenOutputs

IMAGES_OF_ROWS = ((0, 1), (2,), (), (), ())
"""With two ranks, the second one has no image."""
RESPONSE = 6
LAYOUTS: dict[str, tuple[str, dict[str, int]]] = {
    "one unit": ("fsdp", {}),
    "layers apart": ("fsdp", {}),
    "gathered once": ("shard_grad_op", {}),
    "whole weights": ("ddp", {}),
    "matrices": ("fsdp", {"tp": 2}),
}


def rows_of(folder: Path) -> DataProto:
    """Return prompts with 2, 1 and no images, and responses, with the columns of an update."""
    reader = ImageReader(str(folder / "model"))
    tokenize = reader.processor.tokenizer
    prompts, images, count = [], [], len(IMAGES_OF_ROWS)
    for numbers in IMAGES_OF_ROWS:
        refs: list[ImageRef] = [image_ref(f"{number}.png", [folder]) for number in numbers]
        places = " and ".join([reader.placeholder] * len(refs))
        text = reader.expanded(f"<|user|>Is {places} it<|end|>", refs)
        prompts.append(torch.tensor(tokenize(text, add_special_tokens=False)["input_ids"]))
        images.append(tuple(map(tuple, refs)))
    generator = torch.Generator().manual_seed(0)
    responses = [torch.randint(40, 100, (RESPONSE - row,), generator=generator) for row in range(5)]
    rows = [torch.cat(pair) for pair in zip(prompts, responses, strict=True)]
    width = max(map(len, prompts))
    left = RaggedTensor.from_rows(prompts, width, at_end=True).padded()
    right = RaggedTensor.from_rows(responses, RESPONSE).padded()
    ids = torch.cat([left, right], dim=1)
    sizes = zip(prompts, responses, strict=True)
    mask = torch.stack(
        [
            torch.cat([torch.arange(width) >= width - len(p), torch.arange(RESPONSE) < len(r)])
            for p, r in sizes
        ]
    ).long()
    assert int(mask.sum()) == sum(map(len, rows))
    noise = {
        name: torch.randn(count, RESPONSE, generator=generator)
        for name in ("advantages", "old_log_probs", "ref_log_prob")
    }
    columns = {
        "prompts": left,
        "responses": right,
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
        "response_mask": mask[:, width:].clone(),
        **noise,
    }
    return DataProto.from_dict(columns, non_tensors={IMAGES: images})


def trained(folder: Path, layout: str, model: dict[str, Any]) -> dict[str, Any]:
    """Return log-probs, gradients and an update on this rank's rows, one row per pass."""
    is_alone = os.environ.get("WORLD_SIZE", "1") == "1"
    strategy, axes = LAYOUTS[layout]
    axes = {} if is_alone else axes
    if layout == "layers apart" and not is_alone:
        sharding.SMALL_ELEMENTS = 0
    config = tiny_config(folder, ParallelConfig(**axes), model, ppo_mini_batch_size=5)
    section = config.actor_rollout_ref.actor
    section.ppo_micro_batch_size_per_gpu = 1
    section.strategy = strategy if not is_alone else "fsdp"
    actor = started(ActorWorker, config, 10)
    engine = actor.engine
    data = own_chunk(rows_of(folder), engine.dims.data_rank(actor.rank), engine.dims.data_size)
    start, real = data.shard.start if data.shard else 0, data.num_real_rows
    scored = actor.compute_log_prob(data)[0].batch["old_log_probs"][:real]
    make, *_ = actor.losses().values()
    loss = replace(make(data), token_outputs=TokenOutputs(entropy=True))
    engine.forward_backward_rows(data, MicroBatchBudget(rows=1), loss)
    engine.sum_gradients()
    gradients = {
        name: full_tensor(weight.grad).clone()
        for name, weight in engine.module.named_parameters()
        if weight.requires_grad and weight.grad is not None
    }
    engine.optimizer.zero_grad()
    engine.has_gradients = False
    return {
        "rows": slice(start, start + real),
        "log_probs": scored,
        "gradients": gradients,
        "metrics": learned(actor.update_actor(data)),
        "weights": weights_of(actor),
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number, size in enumerate(((40, 70), (90, 30), (33, 33))):
        picture(*size, seed=number).save(tmp_path / f"{number}.png")
    return tmp_path


@pytest.mark.parametrize("trains_tower", [False, True], ids=["frozen", "trained"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_without_images_keep_up_with_those_that_have_them(
    layout: str, trains_tower: bool, folder: Path
) -> None:
    write_model("qwen2_5_vl" if layout == "matrices" else "qwen3_vl", folder / "model")
    model = {"freeze_vision_tower": not trains_tower}
    with process_set_back():
        alone = trained(folder, "one unit", model)
    has_tower = any(".visual." in name for name in alone["gradients"])
    assert has_tower == trains_tower
    for result in run_kept(2, trained, folder, layout, model):
        expected = alone["log_probs"][result["rows"]]
        torch.testing.assert_close(result["log_probs"], expected, atol=1e-5, rtol=1e-5)
        assert result["metrics"]["actor/grad_norm"] == pytest.approx(
            alone["metrics"]["actor/grad_norm"], rel=1e-4
        )
        assert result["gradients"].keys() == alone["gradients"].keys()
        for name, grad in alone["gradients"].items():
            assert (result["gradients"][name] - grad).norm() <= 1e-4 * grad.norm() + 1e-9, name
        for name, weight in alone["weights"].items():
            torch.testing.assert_close(result["weights"][name], weight, atol=2e-3, rtol=0)


def test_lora_trains_only_the_language_half(folder: Path) -> None:
    write_model("qwen2_5_vl", folder / "model")
    with process_set_back():
        alone = trained(folder, "one unit", {"lora_rank": 4})
    assert alone["gradients"]
    assert all("lora_" in name and "visual" not in name for name in alone["gradients"])
    for result in run_kept(2, trained, folder, "layers apart", {"lora_rank": 4}):
        for name, grad in alone["gradients"].items():
            assert (result["gradients"][name] - grad).norm() <= 1e-4 * grad.norm() + 1e-9, name
