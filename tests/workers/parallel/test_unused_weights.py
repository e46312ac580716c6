"""A weight that a rank does not reach does not block others; one that no rank reaches stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.workers.kept_ranks import run_kept
from tests.workers.samples import make_batch, own_chunk, started, tiny_config, weights_of
from verl_like.batch.protocol import DataProto
from verl_like.process.worker import Worker
from workers.config import OptimConfig
from workers.parallel import sharding
from workers.parallel.fsdp import (
    GradientWatch,
    add_up_gradients,
    begin_pass,
    full_tensor,
    shard,
)
from workers.parallel.groups import RankGroups
from workers.parallel.sharding import ParallelDims
from workers.roles.actor import ActorWorker
from workers.training.loss import lm_loss
from workers.training.microbatch import MicroBatchBudget


class Experts(nn.Module):
    """Three experts, of which a pass uses one, and a head."""

    _no_split_modules = ("Expert",)

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, size, bias=False) for size in (2, 6, 4))
        self.heads = nn.ModuleList(nn.Linear(size, 1, bias=False) for size in (2, 6, 4))
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator)

    def forward(self, tokens: Tensor, expert: int) -> Tensor:
        score: Tensor = self.heads[expert](self.experts[expert](tokens)).sum()
        return score


def gradients(strategy: str) -> dict[str, Tensor]:
    """Return full gradients after two passes; each rank's passes use a different expert.

    Nobody uses the third expert, so it has none.
    """
    worker = Worker()
    worker.open_process_group()
    module = Experts()
    is_sharded = strategy == "fsdp"
    if is_sharded:
        mesh = RankGroups(ParallelDims(shard=worker.world_size), worker.device).fsdp_mesh
        is_one_unit = shard(module, mesh, None)
        watch = GradientWatch(module)
        watch.begin()
    for last in (False, True):
        if is_sharded:
            begin_pass(module, is_one_unit, last)
        for rank in range(2) if worker.world_size == 1 else [worker.rank]:
            module(torch.full((3, 4), rank + 1.0), rank).backward()
    group = torch.distributed.group.WORLD if worker.world_size > 1 else None
    if is_sharded:
        watch.drop_unreached(group)
    else:
        add_up_gradients(list(module.parameters()), group)
    grads = {}
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            grads[name] = full_tensor(parameter.grad)
    return grads


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_an_expert_unused_on_one_rank_has_the_other_rank_s_gradient(strategy: str) -> None:
    one_rank = gradients("single")
    assert sorted(one_rank) == [
        *("experts.0.weight", "experts.1.weight"),
        *("heads.0.weight", "heads.1.weight"),
    ]
    for ours in run_kept(2, gradients, strategy):
        assert ours.keys() == one_rank.keys()
        for name, gradient in one_rank.items():
            torch.testing.assert_close(ours[name], gradient)


LAYERS_OF_STEP: list[list[set[int]]] = [[{1}, set()], [set(), set()], [{0, 1}, {0}]]
"""The layers that the passes of each row use, by step: the first is not used until the last."""


def use_layers(module: Any, layers: set[int]) -> None:
    """Let the other layers return their inputs unchanged from now on."""
    for number, layer in enumerate(module.model.layers):
        layer.__dict__.pop("forward", None)
        if number not in layers:
            layer.forward = lambda states, *_, **__: 1.0 * states


def trained(
    tiny_dir: Path, folder: Path, strategy: str, is_large: bool
) -> list[tuple[dict[str, Tensor], list[str]]]:
    """Return the weights, and the names of those with moments, after each step of a rank.

    The third step follows a resume. A rank trains on one of the two rows; a single rank on both.
    """
    if is_large:
        sharding.SMALL_ELEMENTS = 0
    config = tiny_config(
        tiny_dir,
        optim=OptimConfig(lr=2e-5, weight_decay=2.0, lr_scheduler_type="constant"),
        strategy=strategy,
        grad_clip=0.5,
    )
    actor, results = started(ActorWorker, config, 10), []
    for step, layers_of_rows in enumerate(LAYERS_OF_STEP):
        if step == 2:
            actor.save_checkpoint(str(folder / "saved"))
            actor = started(ActorWorker, config, 10)
            actor.load_checkpoint(str(folder / "saved"))
        engine = actor.engine
        counts = {"num_rows": 2, "num_tokens": int(make_batch(2).batch["response_mask"].sum())}
        for row in range(2) if actor.world_size == 1 else [actor.rank]:
            chunk = make_batch(2)[row : row + 1]
            if actor.world_size == 2:
                chunk = own_chunk(make_batch(2), row, 2)
            use_layers(engine.module, layers_of_rows[row])
            engine.forward_backward_rows(chunk, MicroBatchBudget(rows=1), lm_loss(), counts)
        engine.optim_step()
        named = dict(engine.module.named_parameters())
        moments = [name for name, weight in named.items() if weight in engine.optimizer.state]
        results.append((weights_of(actor), moments))
    return results


def trained_by_torch(tiny_dir: Path) -> list[tuple[dict[str, Tensor], list[str]]]:
    """Return what `trained` returns, of transformers' model, autograd and torch's AdamW."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_dir / "model", dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, weight_decay=2.0)
    rows: DataProto = make_batch(2)
    num_tokens = rows.batch["response_mask"].sum()
    results = []
    for layers_of_rows in LAYERS_OF_STEP:
        for row, layers in enumerate(layers_of_rows):
            use_layers(model, layers)
            real = rows.batch["attention_mask"][row].bool()
            ids = rows.batch["input_ids"][row][real]
            in_loss = torch.cat([torch.zeros(6), rows.batch["response_mask"][row]])[real]
            log_probs = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
            log_probs = log_probs.gather(1, ids[1:, None])[:, 0]
            (-(log_probs * in_loss[1:]).sum() / num_tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        named = dict(model.named_parameters())
        moments = [name for name, weight in named.items() if weight in optimizer.state]
        results.append(({name: w.detach().clone() for name, w in named.items()}, moments))
    return results


@pytest.mark.parametrize(
    ("world_size", "strategy", "is_large"),
    [(1, "single", False), (2, "ddp", False), (2, "fsdp", False), (2, "fsdp", True)],
)
def test_weights_without_a_gradient_are_left_alone_as_in_plain_torch(
    tiny_dir: Path, tmp_path: Path, world_size: int, strategy: str, is_large: bool
) -> None:
    expected = trained_by_torch(tiny_dir)
    moved = [any(".layers.0." in name for name in moments) for _, moments in expected]
    assert moved == [False, False, True]
    arguments = tiny_dir, tmp_path, strategy, is_large
    for results in run_kept(world_size, trained, *arguments):
        for (weights, moments), (weights_there, moments_there) in zip(
            results, expected, strict=True
        ):
            assert moments == moments_there
            assert weights.keys() == weights_there.keys()
            for name, weight in weights_there.items():
                assert (weights[name] - weight).abs().max() <= 1e-7, name
