from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.workers.gradients import ACTOR_COLUMNS, assert_equal_gradients, gradients
from tests.workers.kept_ranks import run_kept
from tests.workers.samples import make_batch, own_chunk, started, tiny_config, weights_of
from verl_like.errors import ConfigError
from verl_like.process.worker import Worker
from workers.config import FSDPConfig, OptimConfig
from workers.models.load import PickledTensors, load_model
from workers.parallel.fsdp import full_tensor
from workers.parallel.groups import RankGroups
from workers.parallel.sharding import ParallelDims, resolve_sharding
from workers.roles.actor import ActorWorker
from workers.training.microbatch import MicroBatchBudget


class Collectives(TorchDispatchMode):
    """Counts FSDP2's collectives by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = {"_allgather_base_": 0, "_reduce_scatter_base_": 0}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and func.overloadpacket.__name__ in self.counts:
            self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def under(one_layer_dir: Path, strategy: str, **model: Any) -> dict[str, Any]:
    config = tiny_config(one_layer_dir, model=model, strategy=strategy, ppo_mini_batch_size=6)
    actor = started(ActorWorker, config, 10)
    data = own_chunk(make_batch(6), actor.rank, actor.world_size)
    with Collectives() as collectives:
        grads = gradients(actor, data, ACTOR_COLUMNS, MicroBatchBudget(rows=1))
    actor.update_actor(data)
    elements = sum(getattr(p, "_local_tensor", p).numel() for p in actor.engine.parameters())
    return {
        "gradients": grads,
        "elements": elements,
        "checksum": actor.weights_checksum(),
        "collectives": collectives.counts,
    }


@pytest.fixture(scope="module")
def one_rank(one_layer_dir: Path) -> dict[str, Any]:
    """Return the results of one rank."""
    return under(one_layer_dir, "single")


@pytest.fixture(scope="module")
def one_rank_in_bfloat16(one_layer_dir: Path) -> dict[str, Any]:
    return bfloat16(one_layer_dir, "single")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp_offload"])
def test_a_strategy_changes_only_where_weights_are_stored(
    one_layer_dir: Path, one_rank: dict[str, Any], strategy: str
) -> None:
    results = run_kept(2, under, one_layer_dir, strategy)
    for result in results:
        assert_equal_gradients(result["gradients"], one_rank["gradients"])
        assert result["checksum"] == results[0]["checksum"]
    elements = [result["elements"] for result in results]
    assert (
        elements == [one_rank["elements"]] * 2
        if strategy == "ddp"
        else max(elements) < 0.6 * one_rank["elements"]
    )
    per_mini_batch = 0 if strategy == "ddp" else 1
    assert set(results[0]["collectives"].values()) == {per_mini_batch}


def gathers_whole(shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype]) -> bool:
    """Return whether row-sharded tensors are gathered correctly; in a rank's process."""
    Worker().open_process_group()
    mesh = RankGroups(ParallelDims(shard=3), torch.device("cpu")).fsdp_mesh
    is_equal = []
    for shape, dtype in itertools.product(shapes, dtypes):
        whole = torch.arange(torch.Size(shape).numel()).view(*shape).to(dtype)
        gathered = full_tensor(distribute_tensor(whole, mesh, [Shard(0)]))
        is_equal.append(torch.equal(gathered, whole))
    return all(is_equal)


def test_every_rank_gathers_whole_weights_of_any_type_and_size() -> None:
    shapes, dtypes = [(64, 8), (7,), (4, 3), (1, 5)], [torch.float32, torch.bfloat16, torch.int8]
    assert run_kept(3, gathers_whole, shapes, dtypes) == [True] * 3


def test_offloading_on_the_cpu_changes_no_bit(
    one_layer_dir: Path, one_rank: dict[str, Any]
) -> None:
    assert under(one_layer_dir, "fsdp_offload")["checksum"] == one_rank["checksum"]


def test_mixed_precision_computes_in_bfloat16_with_float32_weights(
    one_rank: dict[str, Any], one_rank_in_bfloat16: dict[str, Any]
) -> None:
    for name, grad in one_rank["gradients"].items():
        rounded = one_rank_in_bfloat16["gradients"][name]
        assert rounded.dtype == torch.float32
        assert 1e-5 < (rounded - grad).norm() / grad.norm() < 0.1, name


def bfloat16(one_layer_dir: Path, strategy: str) -> dict[str, Any]:
    return under(one_layer_dir, strategy, compute_dtype="bfloat16")


def test_numbers_in_bfloat16_do_not_depend_on_the_strategy(
    one_layer_dir: Path, one_rank_in_bfloat16: dict[str, Any]
) -> None:
    for result in run_kept(2, bfloat16, one_layer_dir, "fsdp"):
        assert_equal_gradients(result["gradients"], one_rank_in_bfloat16["gradients"])


@pytest.mark.parametrize("stored", ["mapped", "before torch 1.6", "two files"])
def test_weights_in_pickles_equal_those_in_safetensors(
    one_layer_dir: Path, tmp_path: Path, stored: str
) -> None:
    model = load_model(tiny_config(one_layer_dir).actor_rollout_ref.model, "token")
    folder = tmp_path / "model"
    model.save_pretrained(folder)
    (folder / "model.safetensors").unlink()
    weights, names = model.state_dict(), ["pytorch_model.bin"] * 2
    if stored == "two files":
        names = ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"]
        weight_map = {name: names[place % 2] for place, name in enumerate(weights)}
        index = folder / "pytorch_model.bin.index.json"
        index.write_text(json.dumps({"weight_map": weight_map}))
    else:
        weight_map = dict.fromkeys(weights, "pytorch_model.bin")
    for file in set(names):
        part = {name: weights[name] for name in weights if weight_map[name] == file}
        is_new = stored != "before torch 1.6"
        torch.save(part, folder / file, _use_new_zipfile_serialization=is_new)
    other = load_model(tiny_config(tmp_path).actor_rollout_ref.model, "token")
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True)
    )


def test_a_slice_of_a_pickle_reads_only_its_own_bytes(tmp_path: Path) -> None:
    torch.save({"large": torch.ones(64, 2**18), "step": 3}, tmp_path / "pytorch_model.bin")
    before = anonymous_bytes()
    tensors = PickledTensors(tmp_path / "pytorch_model.bin")
    part = tensors.get_slice("large")[32:33].clone()
    assert tensors.keys() == ["large"]
    assert part.sum() == 2**18
    assert anonymous_bytes() - before < 8 * 2**20  # the file has 64 MiB


def anonymous_bytes() -> int:
    """Return this process's resident memory that belongs to no file."""
    status = Path("/proc/self/status").read_text()
    (kilobytes,) = re.findall(r"RssAnon:\s+(\d+) kB", status)
    return int(kilobytes) * 1024


@pytest.mark.parametrize(
    ("strategy", "config", "message"),
    [
        ("single", FSDPConfig(fsdp_size=2), "keeps the whole model on every rank"),
        ("ddp", FSDPConfig(fsdp_size=4), "Set strategy=fsdp"),
        ("fsdp_offload", FSDPConfig(param_offload=False), "contradict each other"),
        ("shard_grad_op+offload", FSDPConfig(optimizer_offload=False), "contradict each other"),
    ],
)
def test_a_strategy_that_contradicts_its_fsdp_config_is_rejected(
    strategy: str, config: FSDPConfig, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_sharding(strategy, config)


OPTIMIZERS = ["torch.optim.SGD", "torch.optim.Adagrad"]


def weights_after(one_layer_dir: Path, optimizers: Sequence[str]) -> list[dict[str, torch.Tensor]]:
    """Return the actor's weights after two updates, for each optimizer."""
    weights = []
    for optimizer in optimizers:
        config = tiny_config(
            one_layer_dir, optim=OptimConfig(optimizer=optimizer, lr=1e-3), ppo_mini_batch_size=4
        )
        actor = started(ActorWorker, config, 10)
        actor.update_actor(own_chunk(make_batch(8), actor.rank, actor.world_size))
        weights.append(weights_of(actor))
    return weights


def test_any_optimizer_of_torch_steps_sharded_weights(one_layer_dir: Path) -> None:
    sharded = run_kept(2, weights_after, one_layer_dir, OPTIMIZERS)[0]
    for optimizer, ours, one_rank in zip(
        OPTIMIZERS, sharded, weights_after(one_layer_dir, OPTIMIZERS), strict=True
    ):
        for name, weight in one_rank.items():
            assert (ours[name] - weight).norm() <= 1e-3 * weight.norm(), (optimizer, name)
