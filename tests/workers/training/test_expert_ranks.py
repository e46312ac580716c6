"""Whole updates of models whose experts are on several ranks, against one process."""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.workers.distributed import run
from tests.workers.kept_ranks import run_kept
from tests.workers.samples import learned, make_batch, own_chunk, started, tiny_config
from tests.workers.training.test_sequence_ranks import FAMILIES as ALL
from tests.workers.training.test_sequence_ranks import SIZES, WITH_ROUTER_LOSS, distance
from tests.workers.training.three_updates import chunk_of, three_updates
from workers.config import OptimConfig, ParallelConfig
from workers.models.load import Folder
from workers.models.state import local_shard, named_state
from workers.parallel.fsdp import full_tensor
from workers.roles.actor import ActorWorker
from workers.roles.critic import CriticWorker
from workers.roles.reference import ReferenceWorker
from workers.training.microbatch import MicroBatchBudget

NUM_ROWS = 7
FAMILIES = ("mixtral", "qwen3-moe", "deepseek-v3", "gpt-oss")
CHANGES: dict[str, dict[str, Any]] = {
    "three micro-batches": {"rows": 1},
    "one micro-batch": {"rows": NUM_ROWS},
    "tokens": {"tokens": 40},
    "checkpointing": {"rows": 1, "enable_gradient_checkpointing": True},
    "gathered once": {"rows": 1, "strategy": "shard_grad_op"},
    "lora": {"rows": 1, "lora_rank": 4, "target_modules": "all-linear"},
    "layer by layer": {"rows": 1, "layer_by_layer": True},
    "layer by layer, checkpointing": {
        "rows": 1,
        "layer_by_layer": True,
        "enable_gradient_checkpointing": True,
    },
    "rows on several ranks": {"rows": 3, "sp": 2},
    "whole copies": {"rows": 1, "fsdp_size": 2},
}


def saved(folder: Path, family: str) -> Path:
    """The folder of a small model, whose state is off its defaults, including router buffers."""
    import transformers

    name, own = ALL[family]
    torch.manual_seed(0)
    config = getattr(transformers, name)(**{**SIZES, **own})
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for _, weight in named_state(model):
            weight.add_(0.1 * torch.randn_like(weight))
    model.save_pretrained(folder / "model")
    return folder


def make_actor_config(folder: Path, family: str, change: dict[str, Any]) -> Any:
    """Return the configuration of actor and critic, with experts over `ep` ranks."""
    from workers.parallel import sharding

    change, world = dict(change), int(os.environ.get("WORLD_SIZE", "1"))
    layer_by_layer, size = change.pop("layer_by_layer", False), change.pop("fsdp_size", -1)
    rows, tokens = change.pop("rows", None), change.pop("tokens", None)
    config = tiny_config(folder, ppo_mini_batch_size=NUM_ROWS, entropy_coeff=0.01)
    section = config.actor_rollout_ref.actor
    section.optim, config.critic.optim = OptimConfig(lr=1e-4, eps=1e-4), {"lr": 1e-4}
    section.use_dynamic_bsz = rows is None
    if rows is None:
        section.ppo_max_token_len_per_gpu = tokens
    else:
        section.ppo_micro_batch_size_per_gpu = rows
    if family in WITH_ROUTER_LOSS and "lora_rank" not in change:
        section.router_aux_loss_coef = 0.5
    section.strategy = config.critic.strategy = change.pop("strategy", "fsdp")
    sizes = {"sp": 1, "tp": 1, "ep": world}
    axes = {axis: min(change.pop(axis, size), world) for axis, size in sizes.items()}
    config.parallel = ParallelConfig(**axes)
    if world > 1:
        section.fsdp_config = config.critic.model.fsdp_config = {"fsdp_size": size}
        sharding.SMALL_ELEMENTS = 0 if layer_by_layer else sharding.SMALL_ELEMENTS
    for name, value in change.items():
        setattr(config.actor_rollout_ref.model, name, value)
    return config


def trained(folder: Path, family: str, change: dict[str, Any], num_rows: int) -> dict[str, Any]:
    """Return log-probs, gradients and three updates of actor and critic."""
    config = make_actor_config(folder, family, change)
    actor, critic = started(ActorWorker, config, 10), started(CriticWorker, config, 10)
    rows = change.get("rows")
    budget = MicroBatchBudget(rows=rows) if rows else MicroBatchBudget(tokens=change["tokens"])
    experts = [w for name, w in actor.engine.module.named_parameters() if ".experts." in name]
    return {
        "held": sum(local_shard(weight).numel() for weight in experts),
        **three_updates(actor, critic, chunk_of(actor, num_rows), budget),
    }


QUICK = [("qwen3-moe", 2, "three micro-batches"), ("gpt-oss", 2, "layer by layer, checkpointing")]
QUICK += [("deepseek-v3", 4, "whole copies")]


def cells() -> list[Any]:
    found = []
    for family in FAMILIES:
        for num_ranks in (2, 4):
            for change in CHANGES:
                if (num_ranks, change) == (2, "whole copies"):
                    continue  # would be two ranks
                quick = (family, num_ranks, change) in QUICK
                marks = [] if quick else [pytest.mark.slow]
                found.append(pytest.param(family, num_ranks, change, marks=marks))
    return found


def assert_equal(found: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    for result in found:
        expected = alone["log_probs"][result["rows"]]
        torch.testing.assert_close(result["log_probs"], expected, atol=1e-6, rtol=0)
        for role in ("", "critic_"):
            assert distance(result[f"{role}gradients"], alone[f"{role}gradients"]) < 2e-6
            assert distance(result[f"{role}weights"], alone[f"{role}weights"]) < 1e-6
            for ours, theirs in zip(result[f"{role}metrics"], alone[f"{role}metrics"], strict=True):
                assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(("family", "num_ranks", "change"), cells())
def test_ranks_with_a_part_of_the_experts_train_as_one(
    tmp_path: Path, family: str, num_ranks: int, change: str
) -> None:
    folder, how = saved(tmp_path, family), CHANGES[change]
    alone = trained(folder, family, how, NUM_ROWS)
    how = how | {"ep": 2}
    # where meshes of one size have unlike groups, torch in a kept process would take old ones
    start = run_kept if num_ranks == 2 and change != "rows on several ranks" else run
    found = start(num_ranks, trained, folder, family, how, NUM_ROWS, deadline_s=150)
    assert_equal(found, alone)
    copies = 2 if change == "whole copies" else 1
    assert sum(result["held"] for result in found) == copies * alone["held"]
    assert len({result["held"] for result in found}) == 1


def test_a_rank_without_a_row_takes_part(tmp_path: Path) -> None:
    folder, how = saved(tmp_path, "qwen3-moe"), {"rows": 1}
    alone = trained(folder, "qwen3-moe", how, 1)
    found = run_kept(2, trained, folder, "qwen3-moe", how, 1)
    assert sorted(len(result["log_probs"]) for result in found) == [0, 1]
    assert_equal(found, alone)


def small_actor(folder: Path, family: str, **change: Any) -> ActorWorker:
    config = make_actor_config(folder, family, {"rows": 3, **change})
    config.actor_rollout_ref.actor.ema_decay = 0.5
    return started(ActorWorker, config, 10)


def one_update(actor: ActorWorker, seed: int) -> dict[str, float]:
    dims = actor.engine.dims
    data = own_chunk(make_batch(NUM_ROWS, seed), dims.data_rank(actor.rank), dims.data_size)
    return learned(actor.update_actor(data))


def files_of(folder: Path) -> dict[str, Any]:
    """Return every tensor of an exported folder."""
    from safetensors.torch import load_file

    return {name: t for path in folder.glob("*.safetensors") for name, t in load_file(path).items()}


def go_on(
    folder: Path, family: str, loaded: str, written: str, **change: Any
) -> tuple[str, dict[str, torch.Tensor], dict[str, float]]:
    """Return the weights' hash, the average and the next update, all from a checkpoint."""
    actor = small_actor(folder, family, **change)
    if loaded:
        actor.load_checkpoint(str(folder / loaded))
    else:
        one_update(actor, 0)
    weights = actor.weights_checksum()
    with torch.no_grad():
        average = {name: full_tensor(t).clone() for name, t in actor.average.tensors.items()}
    if written:
        actor.save_checkpoint(str(folder / written))
        actor.export_model(str(folder / f"{written} exported"))
    return weights, average, one_update(actor, 1)


@pytest.mark.parametrize("family", ["qwen3-moe", pytest.param("gpt-oss", marks=pytest.mark.slow)])
def test_checkpoints_of_experts_on_ranks_resume_anywhere(tmp_path: Path, family: str) -> None:
    """Two ranks with half the experts each, two that shard, one; their files are bit-equal."""
    folder = saved(tmp_path, family)
    start = run_kept(2, go_on, folder, family, "", "spread")
    sharded = run(2, without_experts, folder, family, "spread", "sharded")
    alone = go_on(folder, family, "sharded", "alone")
    back = run_kept(2, go_on, folder, family, "alone", "")

    weights, average, metrics = start[0]
    for other in (*start, *sharded, alone, *back):
        assert other[0] == weights
        for name, tensor in average.items():
            assert torch.equal(other[1][name], tensor)
        assert other[2] == pytest.approx(metrics, rel=1e-4, abs=1e-6)
    expected = files_of(folder / "alone exported")
    for exported in (files_of(folder / "spread exported"), files_of(folder / "sharded exported")):
        assert exported.keys() == expected.keys()
        assert all(torch.equal(exported[name], tensor) for name, tensor in expected.items())


def without_experts(folder: Path, family: str, loaded: str, written: str) -> Any:
    return go_on(folder, family, loaded, written, ep=1)


def scored_by_reference(
    folder: Path, **change: Any
) -> tuple[slice, torch.Tensor, str, Counter[int]]:
    """Return a frozen model's log-probs, its hash, and the elements read of each expert."""
    read = Counter[int]()
    find = Folder.find

    def watched(self: Folder, name: str) -> Any:
        found = find(self, name)
        return found if found is None else Noted(found, name, read)

    Folder.find = watched
    config = make_actor_config(folder, "deepseek-v3", {"rows": 3, **change})
    try:
        worker = started(ReferenceWorker, config)
    finally:
        Folder.find = find
    dims = worker.engine.dims
    data = own_chunk(make_batch(NUM_ROWS), dims.data_rank(worker.rank), dims.data_size)
    start, real = data.shard.start, data.num_real_rows
    log_probs = worker.compute_ref_log_prob(data).batch["ref_log_prob"][:real]
    return slice(start, start + real), log_probs, worker.weights_checksum(), read


class Noted:
    """A tensor in a file that records the experts that are read."""

    def __init__(self, stored: Any, name: str, read: Counter[int]) -> None:
        self.stored, self.name, self.read = stored, name, read

    def get_shape(self) -> list[int]:
        return list(self.stored.get_shape())

    def __getitem__(self, where: Any) -> torch.Tensor:
        some: torch.Tensor = self.stored[where]
        if found := re.search(r"\.experts\.(\d+)\.", self.name):
            self.read[int(found[1])] += some.numel()
        return some


def test_a_frozen_model_has_its_experts_on_ranks_that_read_no_others(tmp_path: Path) -> None:
    folder = saved(tmp_path, "deepseek-v3")
    _, expected, weights, read = scored_by_reference(folder)
    assert {*read} == {0, 1, 2, 3}
    for rank, (rows, found, hash_of_rank, read) in enumerate(
        run_kept(2, scored_by_reference, folder)
    ):
        torch.testing.assert_close(found, expected[rows], atol=1e-6, rtol=0)
        assert hash_of_rank == weights
        assert {*read} == {2 * rank, 2 * rank + 1}


def test_ranks_that_share_each_expert_read_their_slices_of_it(tmp_path: Path) -> None:
    folder = saved(tmp_path, "deepseek-v3")
    _, expected, weights, read = scored_by_reference(folder)
    for rows, found, hash_of_rank, own in run_kept(2, scored_by_reference_on_slices, folder):
        torch.testing.assert_close(found, expected[rows], atol=1e-6, rtol=0)
        assert hash_of_rank == weights
        assert {expert: 2 * count for expert, count in own.items()} == read


def scored_by_reference_on_slices(folder: Path) -> Any:
    return scored_by_reference(folder, tp=2, ep=1)
