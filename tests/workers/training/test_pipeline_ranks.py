"""Whole updates with pipeline stages over several ranks, against one process."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.workers import distributed
from tests.workers.kept_ranks import process_set_back, run_kept
from tests.workers.samples import started, tiny_config
from tests.workers.training.test_sequence_ranks import (
    FAMILIES,
    NUM_ROWS,
    WITH_ROUTER_LOSS,
    distance,
    saved,
)
from tests.workers.training.test_tensor_ranks import (
    resumed,
    updated_and_saved,
)
from tests.workers.training.three_updates import chunk_of, three_updates
from workers.config import OptimConfig, ParallelConfig
from workers.parallel import sharding
from workers.roles.actor import ActorWorker
from workers.roles.critic import CriticWorker
from workers.training import lm_head
from workers.training.mfu import needed_flops
from workers.training.microbatch import MicroBatchBudget
from workers.weights.checksum import checksum_of

CUT = [family for family in FAMILIES if family not in ("outnumbered heads",)]
CUT.remove("qwen2, one head of keys")
LORA = {"lora_rank": 4, "target_modules": "all-linear"}
TWO: dict[str, dict[str, Any]] = {
    "three micro-batches": {"rows": 3},
    "one micro-batch": {"rows": NUM_ROWS},
    "gpipe": {"rows": 2, "pp_schedule": "gpipe"},
    "interleaved": {"rows": 3, "pp_schedule": "interleaved"},
    "checkpointing": {"rows": 3, "enable_gradient_checkpointing": True},
    "head in chunks": {"rows": 3, "chunk": 4 * 5 * 50 // 2},
    "padded": {"rows": 3, "use_remove_padding": False},
    "lora": {"rows": 3, **LORA},
    "lora at once": {"rows": NUM_ROWS, **LORA},
}
FOUR: dict[str, dict[str, Any]] = {
    "four stages": {"rows": 1, "pp": 4},
    "shards, too": {"rows": 2, "shard": 2},
    "copies, too": {"rows": 2, "shard": 1},
    "layers apart": {"rows": 1, "one_unit": 0},
    "gathered once": {"rows": 2, "one_unit": 0, "strategy": "shard_grad_op"},
    "interleaved": {"rows": 1, "one_unit": 0, "pp_schedule": "interleaved"},
    "interleaved, gathered once": {
        "rows": 1,
        "one_unit": 0,
        "pp_schedule": "interleaved",
        "strategy": "shard_grad_op",
    },
    "interleaved experts": {"rows": 1, "ep": 2, "pp_schedule": "interleaved"},
    "whole weights": {"rows": 2, "strategy": "ddp"},
    "sequences, too": {"rows": 2, "sp": 2},
    "matrices, too": {"rows": 2, "tp": 2, "layers": 3},
    "experts, too": {"rows": 2, "ep": 2},
    "lora": {"rows": 2, **LORA},
}
QUICK = [("gemma-2", "interleaved"), ("deepseek-v3", "three micro-batches"), ("qwen3", "lora")]
QUICK_FOUR = [
    ("qwen3-moe", "experts, too"),
    ("qwen3", "matrices, too"),
    ("qwen3", "interleaved, gathered once"),
    ("mixtral", "interleaved experts"),
]
EXPERTS = ("mixtral", "qwen3-moe", "deepseek-v3", "gpt-oss")
AXES = ("pp", "pp_schedule", "sp", "tp", "ep", "shard")


def trained(folder: Path, family: str, change: dict[str, Any]) -> dict[str, Any]:
    """Return log-probs, gradients and three updates of actor and critic."""
    change, is_alone = dict(change), os.environ.get("WORLD_SIZE", "1") == "1"
    axes = {"pp": 2, **{name: change.pop(name) for name in AXES if name in change}}
    rows, chunk, one_unit = (change.pop(name, None) for name in ("rows", "chunk", "one_unit"))
    lm_head.CHUNK_BYTES = chunk or lm_head.CHUNK_BYTES
    config = tiny_config(folder, ppo_mini_batch_size=NUM_ROWS, entropy_coeff=0.01)
    actor_section = config.actor_rollout_ref.actor
    actor_section.optim, config.critic.optim = OptimConfig(lr=1e-4, eps=1e-4), {"lr": 1e-4}
    actor_section.ppo_micro_batch_size_per_gpu = rows
    is_heard = axes.get("pp_schedule") != "interleaved" and "lora_rank" not in change
    if family in WITH_ROUTER_LOSS and is_heard:
        actor_section.router_aux_loss_coef = 0.5
    strategy = change.pop("strategy", "fsdp")
    if not is_alone:
        sharding.SMALL_ELEMENTS = sharding.SMALL_ELEMENTS if one_unit is None else one_unit
        actor_section.strategy = config.critic.strategy = strategy
        config.parallel = ParallelConfig(**axes)
    for name, value in change.items():
        setattr(config.actor_rollout_ref.model, name, value)
        setattr(config.critic.model, name, value)

    actor, critic = started(ActorWorker, config, 10), started(CriticWorker, config, 10)
    data = chunk_of(actor, NUM_ROWS)
    return {
        "flops": needed_flops(actor.engine, data, trains=True),
        "loaded": actor.weights_checksum(),
        "sent": checksum_of(actor.engine.named_full_tensors(on_all_ranks=False)),
        **three_updates(actor, critic, data, MicroBatchBudget(rows=rows)),
    }


def of_all_stages(results: list[dict[str, Any]], name: str) -> dict[str, torch.Tensor]:
    """Return the gradients of all stages; ranks of one stage agree."""
    found: dict[str, torch.Tensor] = {}
    for result in results:
        for key, grad in result[name].items():
            assert key not in found or found[key].equal(grad)
            found[key] = grad
    return found


def assert_trains_as_one(folder: Path, family: str, num_ranks: int, how: dict[str, Any]) -> None:
    how = dict(how)
    saved(folder, family, num_hidden_layers=how.pop("layers", 5))
    with process_set_back():
        alone = trained(folder, family, how)
    # torch keeps meshes of equal looks, whose groups end with a test of a kept process
    run = run_kept if num_ranks == 2 else distributed.run
    results = run(num_ranks, trained, folder, family, how, deadline_s=150)
    is_tied = alone["weights"].keys().isdisjoint({"lm_head.weight", "embed_out.weight"})
    for role in ("", "critic_"):
        grads, expected = of_all_stages(results, f"{role}gradients"), alone[f"{role}gradients"]
        assert grads.keys() == expected.keys() > results[0][f"{role}gradients"].keys()
        assert distance(grads, expected) < 2e-6
        if num_ranks == 2 or how.get("pp") == 4:
            others = {name for name, grad in grads.items() if not grad.equal(expected[name])}
            # uses of one weight are added up over the passes first, then over the stages
            assert others <= ({"model.embed_tokens.weight"} if is_tied and not role else set())
    assert results[0]["sent"] == alone["loaded"]
    assert {result["sent"] for result in results[1:]} == {checksum_of([])}
    for result in results:
        assert result["loaded"] == alone["loaded"]
        if num_ranks == 2:
            assert result["flops"] == alone["flops"]
        expected_rows = alone["log_probs"][result["rows"]]
        rtol = 1e-6 if "tp" in how else 0.0  # shared matrices add products up in another order
        torch.testing.assert_close(result["log_probs"], expected_rows, atol=1e-6, rtol=rtol)
        for role in ("", "critic_"):
            assert distance(result[f"{role}weights"], alone[f"{role}weights"]) < 1e-6
            for ours, theirs in zip(result[f"{role}metrics"], alone[f"{role}metrics"], strict=True):
                assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6)


def cells(changes: dict[str, dict[str, Any]], quick: list[tuple[str, str]]) -> list[Any]:
    found = []
    for family in CUT:
        for change in changes:
            if "ep" in changes[change] and family not in EXPERTS:
                continue
            if change == "matrices, too" and family == "gpt-oss":
                continue  # which has no plan
            marks = [] if (family, change) in quick else [pytest.mark.slow]
            found.append(pytest.param(family, change, marks=marks))
    return found


@pytest.mark.parametrize(("family", "change"), cells(TWO, QUICK))
def test_ranks_that_share_layers_train_as_one(tmp_path: Path, family: str, change: str) -> None:
    assert_trains_as_one(tmp_path, family, 2, TWO[change])


@pytest.mark.parametrize(("family", "change"), cells(FOUR, QUICK_FOUR))
def test_four_ranks_share_layers_and_more(tmp_path: Path, family: str, change: str) -> None:
    assert_trains_as_one(tmp_path, family, 4, FOUR[change])


def random_layout(seed: int) -> tuple[str, dict[str, Any]]:
    """Return a family and stages of 4 ranks: any schedule, strategy and second axis."""
    draw = random.Random(seed)
    family = draw.choice(CUT)
    axes = ["sp", "shard"] + ["tp"] * (family != "gpt-oss") + ["ep"] * (family in EXPERTS)
    how: dict[str, Any] = {
        "rows": draw.choice([1, 2]),
        "pp_schedule": draw.choice(["1f1b", "gpipe", "interleaved"]),
        "strategy": draw.choice(["fsdp", "shard_grad_op"]),
        draw.choice(axes): 2,
    }
    if draw.random() < 0.5:
        how["one_unit"] = 0
    return family, how


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[pytest.mark.slow] * (seed > 1)) for seed in range(24)]
)
def test_random_layouts_train_as_one_process(tmp_path: Path, seed: int) -> None:
    family, how = random_layout(seed)
    print(family, how)  # pytest shows it if the test fails
    assert_trains_as_one(tmp_path, family, 4, how)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", "shard_grad_op"])
def test_a_stage_without_ends_has_layers_alone(tmp_path: Path, strategy: str) -> None:
    how = {"rows": 1, "one_unit": 0, "pp": 3, "shard": 2, "strategy": strategy}
    assert_trains_as_one(tmp_path, "gemma-2", 6, how)


def assert_resumes(folder: Path, family: str, lora_rank: int = 0) -> None:
    """Resume from pipeline ranks on one rank, on sharded ranks, and back."""
    saved(folder, family, num_hidden_layers=5)
    stages, interleaved = ParallelConfig(pp=2), ParallelConfig(pp=2, pp_schedule="interleaved")
    first = run_kept(2, updated_and_saved, folder, stages, lora_rank)
    expected, checksum = first[0][0] | first[1][0], first[0][1]
    assert len(expected) > 3 * len([name for name in expected if name.startswith("model.")])
    one = [resumed(folder, ParallelConfig(), lora_rank, "first", "second")]
    shards = run_kept(2, resumed, folder, ParallelConfig(), lora_rank, "second", "third")
    back = run_kept(2, resumed, folder, interleaved, lora_rank, "third", "fourth")
    assert all(state.keys() == expected.keys() for state, _ in [*one, *shards])
    assert back[0][0].keys() | back[1][0].keys() == expected.keys()
    for state, own_checksum in [*first, *one, *shards, *back]:
        assert own_checksum == checksum
        assert all(tensor.equal(expected[name]) for name, tensor in state.items())

    names = ("first", "second", "third", "fourth")
    exports = [load_file(folder / name / "huggingface" / "model.safetensors") for name in names]
    for export in exports[1:]:
        assert export.keys() == exports[0].keys()
        assert all(tensor.equal(exports[0][name]) for name, tensor in export.items())


@pytest.mark.parametrize("family", ["qwen3"])
def test_a_checkpoint_of_stages_resumes_in_any_layout(tmp_path: Path, family: str) -> None:
    assert_resumes(tmp_path, family)


@pytest.mark.slow
@pytest.mark.parametrize("family", CUT)
def test_every_family_resumes_in_any_layout(tmp_path: Path, family: str) -> None:
    assert_resumes(tmp_path, family)


@pytest.mark.slow
@pytest.mark.parametrize("other", [{"tp": 2}, {"shard": 2}, {"sp": 2}, {"shard": 1}])
@pytest.mark.parametrize("family", ["qwen3", "mixtral"])
def test_stages_of_several_ranks_resume_in_any_layout(
    tmp_path: Path, family: str, other: dict[str, int]
) -> None:
    saved(tmp_path, family, num_hidden_layers=5)
    four = ParallelConfig(pp=2, **other)
    first = distributed.run(4, updated_and_saved, tmp_path, four, 0)
    (expected, checksum) = resumed(tmp_path, ParallelConfig(), 0, "first", "second")
    back = distributed.run(4, resumed, tmp_path, four, 0, "second", "third")
    for found in (first, back):
        assert set().union(*(state.keys() for state, _ in found)) == expected.keys()
        for state, own_checksum in found:
            assert own_checksum == checksum
            assert all(tensor.equal(expected[name]) for name, tensor in state.items())


@pytest.mark.slow
def test_an_adapter_resumes_in_any_layout(tmp_path: Path) -> None:
    assert_resumes(tmp_path, "qwen3", lora_rank=4)
