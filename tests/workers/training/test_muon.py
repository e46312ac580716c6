"""Muon for matrices and AdamW for other weights: as torch's, on ranks, and in checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.workers.kept_ranks import process_set_back, run_kept
from tests.workers.samples import make_batch, own_chunk, started, tiny_config, weights_of
from tests.workers.training.rank_layouts import NUM_ROWS, SIZES, distance, saved
from verl_like.errors import ConfigError
from workers.config import OptimConfig, ParallelConfig
from workers.parallel.fsdp import full_tensor
from workers.roles.actor import ActorWorker
from workers.roles.critic import CriticWorker
from workers.training.checkpoints.save_load import optimizer_state
from workers.training.muon import COEFFICIENTS, orthogonalized
from workers.training.optim import OptimStepSettings, Schedule, build_optimizer, check_optim

MATRIX_LR = 0.01
MUON = {"optimizer": "Muon", "lr": 1e-4, "eps": 1e-4, "args": {"matrix_lr": MATRIX_LR}}
State = dict[str, torch.Tensor]


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES | {"intermediate_size": 48}))


def is_hidden_matrix(name: str) -> bool:
    return "_proj." in name


@pytest.mark.parametrize("nesterov", [True, False])
def test_it_is_torch_s_muon_for_matrices_and_its_adamw_for_other_weights(nesterov: bool) -> None:
    ours, theirs = tiny_llama(), tiny_llama()
    args = {"matrix_lr": MATRIX_LR, "momentum": 0.9, "nesterov": nesterov, "ns_steps": 3}
    config = OptimConfig(optimizer="Muon", lr=1e-3, weight_decay=0.1, args=args)
    optimizer = build_optimizer(ours, config)
    named = dict(theirs.named_parameters())
    matrices = [weight for name, weight in named.items() if is_hidden_matrix(name)]
    others = [weight for name, weight in named.items() if not is_hidden_matrix(name)]
    muon = {"momentum": 0.9, "nesterov": nesterov, "ns_steps": 3}
    optimizers = [
        torch.optim.Muon(matrices, lr=MATRIX_LR, weight_decay=0.1, **muon),
        torch.optim.AdamW(others, lr=1e-3, weight_decay=0.1),
    ]
    ids = torch.arange(24).view(2, 12)
    for _ in range(3):
        for model in (ours, theirs):
            model.zero_grad()
            model(input_ids=ids, labels=ids).loss.backward()
        for each in (optimizer, *optimizers):
            each.step()
    before = dict(tiny_llama().named_parameters())
    for name, weight in ours.named_parameters():
        after = moved({name: weight}, before), moved({name: named[name]}, before)
        # torch's Muon computes in bfloat16
        assert distance(*after) < (0.03 if is_hidden_matrix(name) else 0.01), name


@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (5, 5)])
def test_a_matrix_keeps_its_singular_vectors(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    left, sizes, right = torch.linalg.svd(matrix, full_matrices=False)
    sizes = sizes / sizes.norm()
    a, b, c = COEFFICIENTS
    for _ in range(5):
        sizes = a * sizes + b * sizes**3 + c * sizes**5
    torch.testing.assert_close(orthogonalized(matrix, 5), left @ torch.diag(sizes) @ right)


def test_the_schedule_sets_both_rates() -> None:
    config = OptimConfig(**MUON, lr_warmup_steps=3)
    optimizer = build_optimizer(tiny_llama(), config)
    Schedule(optimizer, config, 10).step()
    assert [group["lr"] for group in optimizer.param_groups] == [1e-4 / 2, MATRIX_LR / 2]


def test_a_rate_of_one_step_is_rejected_as_there_are_two() -> None:
    optimizer = build_optimizer(tiny_llama(), OptimConfig(**MUON))
    with pytest.raises(ConfigError, match="Muon has two learning rates"):
        with OptimStepSettings(lr=1e-5).applied_to(optimizer):
            pass


def test_torch_s_muon_is_rejected_with_ours() -> None:
    with pytest.raises(ConfigError, match=r"Muon steps only matrices.*optim.optimizer=Muon"):
        check_optim(OptimConfig(optimizer="torch.optim.Muon"), "optim")


def updated(folder: Path, strategy: str, **axes: int) -> list[State]:
    """Return the weights of actor and critic after two updates, and the actor's whole moments.

    The actor is saved in between, and goes on from the loaded checkpoint.
    """
    settings = {"ppo_mini_batch_size": NUM_ROWS, "strategy": strategy}
    config = tiny_config(folder, ParallelConfig(**axes), **settings)
    config.actor_rollout_ref.actor.optim = OptimConfig(**MUON)
    config.critic.optim, config.critic.strategy = dict(MUON), strategy
    actor, critic = started(ActorWorker, config, 10), started(CriticWorker, config, 10)
    dims = actor.engine.dims
    data = own_chunk(make_batch(NUM_ROWS), dims.data_rank(actor.rank), dims.data_size)
    actor.update_actor(data)
    actor.save_checkpoint(str(folder / f"{strategy} {axes}"))
    actor = started(ActorWorker, config, 10)
    actor.load_checkpoint(str(folder / f"{strategy} {axes}"))
    actor.update_actor(data)
    for _ in range(2):
        critic.update_critic(data)
    state = optimizer_state(actor.engine)
    moments = {name: full_tensor(tensor).clone() for name, tensor in state.items()}
    return [weights_of(actor), weights_of(critic), moments]


def updated_on_ranks(folder: Path, strategy: str, axes: dict[str, int]) -> Any:
    return updated(folder, strategy, **axes)


def moved(after: State, before: State) -> State:
    return {name: (weight - before[name]).detach() for name, weight in after.items()}


@pytest.mark.parametrize(
    ("strategy", "axes"),
    [("fsdp", {}), ("ddp", {}), ("fsdp", {"tp": 2}), ("fsdp", {"pp": 2}), ("fsdp", {"ep": 2})],
)
def test_ranks_step_as_one_process(tmp_path: Path, strategy: str, axes: dict[str, int]) -> None:
    saved(tmp_path, "qwen2-moe" if "ep" in axes else "phi-3", num_hidden_layers=3)
    with process_set_back():
        config = tiny_config(tmp_path)
        before = [weights_of(started(cls, config, 10)) for cls in (ActorWorker, CriticWorker)]
        alone = updated(tmp_path, "single")
    for of_rank in run_kept(2, updated_on_ranks, tmp_path, strategy, axes):
        for start, ours, expected in zip(before, of_rank, alone, strict=False):
            assert distance(moved(ours, start), moved(expected, start)) < 2e-4
        kinds = {name.split(".")[1] for name in of_rank[2]}
        assert kinds == {"momentum_buffer", "exp_avg", "exp_avg_sq", "step"}
        mine = {name: alone[2][name] for name in of_rank[2]}
        assert distance(of_rank[2], mine) < 1e-3
