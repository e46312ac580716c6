"""Whole updates of ranks that share a model's rows, matrices, experts or layers, as one process."""

from __future__ import annotations

import re
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.workers import distributed
from tests.workers.kept_ranks import process_set_back, run_kept
from tests.workers.models.architectures import tiny_model_config
from tests.workers.samples import VOCAB, check_axes_of, make_batch, own_chunk, started, tiny_config
from tests.workers.training.rank_layouts import (
    EXPERTS,
    FAMILIES,
    NUM_ROWS,
    SIZES,
    distance,
    saved,
    trained,
)
from verl_like.errors import ConfigError
from workers.config import ModelConfig, ParallelConfig
from workers.models.load import Folder
from workers.models.support import Support
from workers.roles.reference import ReferenceWorker
from workers.training.passes.row_layout import check_split
from workers.training.role_model_spec import RoleModelSpec
from workers.weights.full_weights import checksum_of

INTERLEAVED = {"pp": 2, "pp_schedule": "interleaved"}
TWO: dict[str, dict[str, Any]] = {
    "tokens": {"sp": 2},
    "matrices": {"tp": 2},
    "experts": {"ep": 2},
    "experts, tokens": {"ep": 2, "sp": 2},
    "layers": {"pp": 2},
    "layers by gpipe": {"pp": 2, "pp_schedule": "gpipe"},
    "interleaved": INTERLEAVED,
}
FOUR: dict[str, dict[str, Any]] = {
    "tokens on four": {"sp": 4},
    "tokens, shards": {"sp": 2},
    "tokens, copies": {"sp": 2, "shard": 1},
    "matrices, shards": {"tp": 2},
    "matrices, copies": {"tp": 2, "shard": 1},
    "matrices, tokens": {"tp": 2, "sp": 2},
    "experts, shards": {"ep": 2},
    "experts, copies": {"ep": 2, "shard": 2},
    "experts, tokens, shards": {"ep": 2, "sp": 2},
    "four stages": {"pp": 4},
    "layers, shards": {"pp": 2, "shard": 2},
    "layers, copies": {"pp": 2, "shard": 1},
    "layers, tokens": {"pp": 2, "sp": 2},
    "layers, matrices": {"pp": 2, "tp": 2},
    "layers, experts": {"pp": 2, "ep": 2},
    "interleaved, shards": {**INTERLEAVED, "shard": 2},
    "interleaved, experts": {**INTERLEAVED, "ep": 2},
}
LAYOUTS = {name: (2, axes) for name, axes in TWO.items()}
LAYOUTS |= {name: (4, axes) for name, axes in FOUR.items()}
WAYS: dict[str, dict[str, Any]] = {
    "several passes": {},
    "one pass": {"rows": NUM_ROWS},
    "tokens": {"rows": None, "tokens": 40},
    "checkpointing": {"enable_gradient_checkpointing": True},
    "head in chunks": {"chunk": 4 * 5 * VOCAB // 2},
    "padded": {"use_remove_padding": False},
    "whole weights": {"strategy": "ddp"},
    "layers apart": {"one_unit": 0},
    "gathered once": {"one_unit": 0, "strategy": "shard_grad_op"},
    "lora": {"lora_rank": 4, "target_modules": "all-linear"},
}
WITH_EXPERTS = ("mixtral", "qwen3-moe", "qwen2-moe", "deepseek-v3", "gpt-oss")
QUICK = [
    ("gemma-2", "tokens", "several passes"),
    ("outnumbered heads", "tokens", "tokens"),
    ("deepseek-v3", "matrices", "checkpointing"),
    ("phi-3", "matrices", "head in chunks"),
    ("qwen3", "matrices", "lora"),
    ("qwen2-moe", "matrices", "several passes"),
    ("qwen3-moe", "experts", "several passes"),
    ("gpt-oss", "experts", "layers apart"),
    ("qwen3", "layers", "lora"),
    ("gemma-2", "interleaved", "several passes"),
    ("qwen3", "matrices, shards", "several passes"),
    ("deepseek-v3", "experts, copies", "several passes"),
    ("mixtral", "interleaved, experts", "several passes"),
]


def is_possible(family: str, layout: str, way: str) -> bool:
    """Return False where the family, the axes or the way exclude each other."""
    axes = LAYOUTS[layout][1]
    by_family = {
        "ep": family in WITH_EXPERTS,
        "tp": family not in ("gpt-oss", "outnumbered heads", "qwen2, one head of keys"),
        "pp": family not in ("outnumbered heads", "qwen2, one head of keys"),
    }
    by_way = {
        "tokens": "pp" not in axes,
        "head in chunks": not {"sp", "ep"} & axes.keys(),
        "padded": "sp" not in axes,
        "whole weights": not {"ep", "shard"} & axes.keys() and axes != INTERLEAVED,
    }
    return by_way.get(way, True) and all(by_family.get(axis, True) for axis in axes)


def cells() -> list[Any]:
    """Return every family in every layout, and every way in every layout with two families."""
    cells = dict.fromkeys(QUICK)
    cells |= dict.fromkeys((f, lay, "several passes") for f in FAMILIES for lay in LAYOUTS)
    some = ("qwen3", "qwen3-moe")
    cells |= dict.fromkeys((f, lay, way) for f in some for lay in LAYOUTS for way in WAYS)
    marks = {cell: [] if cell in QUICK else [pytest.mark.slow] for cell in cells}
    return [
        pytest.param(*cell, marks=marks[cell], id=", ".join(cell))
        for cell in cells
        if is_possible(*cell)
    ]


def of_all_stages(results: list[dict[str, Any]], name: str) -> dict[str, torch.Tensor]:
    """Return the gradients of all stages; ranks of one stage agree."""
    merged: dict[str, torch.Tensor] = {}
    for result in results:
        for key, grad in result[name].items():
            assert merged.setdefault(key, grad).equal(grad)
    return merged


def assert_equal(results: list[dict[str, Any]], alone: dict[str, Any], rtol: float) -> None:
    """Check each rank's log-probs, metrics and weights."""
    for result in results:
        assert result["loaded"] == alone["loaded"]
        expected = alone["log_probs"][result["rows"]]
        torch.testing.assert_close(result["log_probs"], expected, atol=1e-6, rtol=rtol)
        for role in ("", "critic_"):
            assert distance(result[f"{role}weights"], alone[f"{role}weights"]) < 1e-6
            for ours, theirs in zip(result[f"{role}metrics"], alone[f"{role}metrics"], strict=True):
                assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6)


def assert_equal_by_stages(results: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    """Check that two stages, or four, have the bits of one process in every gradient."""
    is_tied = alone["weights"].keys().isdisjoint({"lm_head.weight", "embed_out.weight"})
    for role in ("", "critic_"):
        grads, expected = of_all_stages(results, f"{role}gradients"), alone[f"{role}gradients"]
        assert grads.keys() == expected.keys() > results[0][f"{role}gradients"].keys()
        others = {name for name, grad in grads.items() if not grad.equal(expected[name])}
        # uses of one weight are added up over the passes first, then over the stages
        assert others <= ({"model.embed_tokens.weight"} if is_tied and not role else set())
    assert {result["sent"] for result in results[1:]} == {checksum_of([])}


@pytest.mark.long
@pytest.mark.parametrize(("family", "layout", "way"), cells())
def test_ranks_that_share_a_model_train_as_one(
    tmp_path: Path, family: str, layout: str, way: str
) -> None:
    num_ranks, axes = LAYOUTS[layout]
    num_layers = 2 if "pp" not in axes else 3 if "tp" in axes else 5
    saved(tmp_path, family, num_hidden_layers=num_layers)
    rows = 3 if num_ranks == 2 else 1 if "pp" in axes else 2
    settings = {"rows": rows, **axes, **WAYS[way]}
    with process_set_back():
        alone = trained(tmp_path, family, settings)
    # torch keeps meshes of equal looks, whose groups end with a test of a kept process
    is_kept = num_ranks == 2 and layout != "experts, tokens"
    run = run_kept if is_kept else distributed.run
    results = run(num_ranks, trained, tmp_path, family, settings, deadline_s=150)

    assert_equal(results, alone, rtol=1e-6 if {"tp", "pp"} <= axes.keys() else 0.0)
    assert results[0]["sent"] == alone["loaded"]
    for role in ("", "critic_"):
        expected = alone[f"{role}gradients"]
        merged = [{f"{role}gradients": of_all_stages(results, f"{role}gradients")}]
        for result in merged if "pp" in axes else results:
            assert distance(result[f"{role}gradients"], expected) < 2e-6
    if "pp" in axes and (num_ranks == 2 or axes["pp"] == 4):
        assert_equal_by_stages(results, alone)
    if "ep" in axes and "pp" not in axes:
        assert len({result["held"] for result in results}) == 1
        copies = num_ranks // axes.get("shard", num_ranks)
        assert sum(result["held"] for result in results) == copies * alone["held"]
    if layout in ("matrices", "layers"):
        assert {result["flops"] for result in results} == {alone["flops"]}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", "shard_grad_op"])
def test_a_stage_without_ends_has_only_layers(tmp_path: Path, strategy: str) -> None:
    saved(tmp_path, "gemma-2", num_hidden_layers=5)
    settings = {"rows": 1, "one_unit": 0, "pp": 3, "shard": 2, "strategy": strategy}
    with process_set_back():
        alone = trained(tmp_path, "gemma-2", settings)
    results = distributed.run(6, trained, tmp_path, "gemma-2", settings, deadline_s=150)
    assert_equal(results, alone, rtol=0.0)


def test_a_rank_without_a_row_takes_part(tmp_path: Path) -> None:
    folder, settings = saved(tmp_path, "qwen3-moe"), {"rows": 1, "ep": 2}
    with process_set_back():
        alone = trained(folder, "qwen3-moe", settings, 1)
    results = run_kept(2, trained, folder, "qwen3-moe", settings, 1)
    assert sorted(len(result["log_probs"]) for result in results) == [0, 1]
    assert_equal(results, alone, rtol=0.0)


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 16,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 4.0, 6.0],
}


@pytest.mark.parametrize(
    ("name", "own", "num_ranks", "message"),
    [
        ("LlamaConfig", {}, 3, "does not divide the 4 attention heads.*2 or 4"),
        ("Qwen3NextConfig", {"num_experts": 4, **EXPERTS}, 2, "not run packed"),
        ("Phi3Config", {"rope_parameters": LONGROPE}, 2, "in a test of Phi3ForCausalLM longrope"),
    ],
)
def test_a_model_whose_rows_cannot_be_shared_is_refused(
    name: str, own: dict[str, Any], num_ranks: int, message: str
) -> None:
    import transformers

    config = getattr(transformers, name)(**{**SIZES, **own})
    with pytest.raises(ConfigError, match=f"parallel.sp={num_ranks}.*{message}"):
        check_split(Support.of(config, "sdpa"), num_ranks)


def test_rows_are_split_only_with_an_attention_that_runs_them_packed(tmp_path: Path) -> None:
    tiny_model_config("afmoe").save_pretrained(tmp_path)  # packed only with sdpa
    for attention, allowed in (("auto", True), ("sdpa", True), ("eager", False)):
        model = ModelConfig(path=str(tmp_path), attn_implementation=attention)
        sharded = RoleModelSpec("model.path", model, parallel=ParallelConfig(sp=2))
        expected = nullcontext() if allowed else pytest.raises(ConfigError, match="parallel.sp=2")
        with expected:
            check_axes_of(sharded, 2)


class Noted:
    """A tensor in a file that records the experts that are read."""

    def __init__(self, stored: Any, name: str, read: Counter[int]) -> None:
        self.stored, self.name, self.read = stored, name, read

    def get_shape(self) -> list[int]:
        return list(self.stored.get_shape())

    def __getitem__(self, where: Any) -> torch.Tensor:
        some: torch.Tensor = self.stored[where]
        if module := re.search(r"\.experts\.(\d+)\.", self.name):
            self.read[int(module[1])] += some.numel()
        return some


def scored_by_reference(folder: Path, **axes: int) -> tuple[slice, torch.Tensor, str, Counter[int]]:
    """Return a frozen model's log-probs, its hash, and the elements read of each expert."""
    read = Counter[int]()
    find = Folder.find

    def watched(self: Folder, name: str) -> Any:
        module = find(self, name)
        return module if module is None else Noted(module, name, read)

    Folder.find = watched
    config = tiny_config(folder, parallel=ParallelConfig(**axes))
    try:
        worker = started(ReferenceWorker, config)
    finally:
        Folder.find = find
    dims = worker.engine.dims
    data = own_chunk(make_batch(NUM_ROWS), dims.data_rank(worker.rank), dims.data_size)
    start, real = data.shard.start, data.num_real_rows
    log_probs = worker.compute_ref_log_prob(data).batch["ref_log_prob"][:real]
    return slice(start, start + real), log_probs, worker.weights_checksum(), read


def scored_on_ranks(folder: Path, axis: str) -> Any:
    return scored_by_reference(folder, **{axis: 2})


@pytest.mark.parametrize("axis", ["ep", "tp"])
def test_a_frozen_model_on_ranks_reads_only_their_experts_or_slices(
    tmp_path: Path, axis: str
) -> None:
    folder = saved(tmp_path, "deepseek-v3")
    _, expected, weights, whole = scored_by_reference(folder)
    assert {*whole} == {0, 1, 2, 3}
    results = run_kept(2, scored_on_ranks, folder, axis)
    for rank, (rows, log_probs, hash_of_rank, read) in enumerate(results):
        torch.testing.assert_close(log_probs, expected[rows], atol=1e-6, rtol=0)
        assert hash_of_rank == weights
        if axis == "ep":
            assert {*read} == {2 * rank, 2 * rank + 1}
        else:
            assert {expert: 2 * count for expert, count in read.items()} == whole
