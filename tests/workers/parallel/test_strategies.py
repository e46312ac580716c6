"""What each strategy stores of a model on a rank; `test_fsdp` compares the results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from tests.workers.gradients import ACTOR_COLUMNS, assert_equal_gradients, gradients
from tests.workers.kept_ranks import run_kept
from tests.workers.parallel.test_fsdp import Collectives
from tests.workers.samples import make_batch, own_chunk, started, tiny_config
from verl_like.batch.protocol import DataProto
from workers.config import FSDPConfig
from workers.parallel import sharding
from workers.parallel.sharding import Sharding, resolve_sharding
from workers.roles.actor import ActorWorker, PolicyObjective
from workers.training.microbatch import MicroBatchBudget

NUM_LAYERS, NUM_PASSES = 2, 3


@dataclass
class Stored:
    """Fractions of a model that a rank stores, and the gradients of a mini-batch."""

    weights_at_loss: list[float] = field(default_factory=list)
    """Between each forward pass and its backward pass."""
    weights_after: list[float] = field(default_factory=list)
    """After an update, and after a call that computes log-probs."""
    gradients: float = 0.0
    moments: float = 0.0
    full_gradients: dict[str, Tensor] = field(default_factory=dict)
    gathers: int = 0
    scatters: int = 0


def stored_by_layers(tiny_dir: Path, strategy: str) -> Stored:
    """Measure a model whose layers are FSDP units, in a rank's process."""
    if strategy != "single":
        sharding.SMALL_ELEMENTS = 0
    config = tiny_config(tiny_dir, strategy=strategy, ppo_mini_batch_size=2 * NUM_PASSES)
    actor = started(ActorWorker, config, 10)
    data = own_chunk(make_batch(2 * NUM_PASSES), actor.rank, actor.world_size)
    module, objective, stored = actor.engine.module, actor.objective, Stored()
    total = sum(parameter.numel() for parameter in module.parameters())

    def fraction(tensors: Any) -> float:
        return sum(getattr(t, "_local_tensor", t).numel() for t in tensors) / total

    def noting(data: DataProto) -> PolicyObjective:
        noted = objective(data)
        compute = noted.loss.compute

        def loss(*args: Any) -> Any:
            stored.weights_at_loss.append(fraction(module.parameters()))
            return compute(*args)

        noted.loss = replace(noted.loss, compute=loss)
        return noted

    actor.objective = noting
    with Collectives() as collectives:
        stored.full_gradients = gradients(actor, data, ACTOR_COLUMNS, MicroBatchBudget(rows=1))
    stored.gathers = collectives.counts["_allgather_base_"]
    stored.scatters = collectives.counts["_reduce_scatter_base_"]

    step = actor.engine.optimizer.step
    actor.engine.optimizer.step = partial(note_gradients, stored, step, module, fraction)
    actor.update_actor(data)
    stored.weights_after.append(fraction(module.parameters()))
    states = actor.engine.optimizer.state.values()
    stored.moments = fraction(state["exp_avg"] for state in states)
    actor.compute_log_prob(data)
    stored.weights_after.append(fraction(module.parameters()))
    return stored


def note_gradients(stored: Stored, step: Callable[[], Any], module: Any, fraction: Any) -> None:
    stored.gradients = fraction(p.grad for p in module.parameters())
    step()


def test_shard_grad_op_gathers_once_per_mini_batch_and_fsdp_per_pass(
    tiny_dir: Path,
) -> None:
    one_rank = stored_by_layers(tiny_dir, "single").full_gradients
    fully = run_kept(2, stored_by_layers, tiny_dir, "fsdp")
    by_gradient = run_kept(2, stored_by_layers, tiny_dir, "shard_grad_op")
    for rank in range(2):
        assert max(fully[rank].weights_at_loss) < 0.9
        assert set(by_gradient[rank].weights_at_loss) == {1.0}
        assert by_gradient[rank].gathers == 1 + NUM_LAYERS
        assert fully[rank].gathers > NUM_PASSES * NUM_LAYERS
        assert by_gradient[rank].scatters == fully[rank].scatters == NUM_PASSES * (1 + NUM_LAYERS)
        for stored in (fully[rank], by_gradient[rank]):
            assert_equal_gradients(stored.full_gradients, one_rank)
            assert max(*stored.weights_after, stored.gradients, stored.moments) < 0.6


def test_offload_is_a_suffix_of_a_strategy() -> None:
    config = FSDPConfig()
    assert resolve_sharding("shard_grad_op+offload", config) == Sharding(
        "shard_grad_op", -1, True, True
    )
    assert resolve_sharding("fsdp+offload", config) == resolve_sharding("fsdp_offload", config)
    assert resolve_sharding("shard_grad_op", config) == Sharding("shard_grad_op", -1, False, False)


def order_of_gathers(tiny_dir: Path) -> list[str]:
    """Return the order of gathers and layers in one pass, in a rank's process."""
    sharding.SMALL_ELEMENTS = 0
    actor = started(ActorWorker, tiny_config(tiny_dir, strategy="fsdp"), 10)
    log: list[str] = []

    class Noted(Collectives):
        def __torch_dispatch__(self, func: Any, *rest: Any) -> Any:
            if func.namespace == "c10d" and func.overloadpacket.__name__ == "_allgather_base_":
                log.append("gather")
            return super().__torch_dispatch__(func, *rest)

    for number, layer in enumerate(actor.engine.module.model.layers):
        layer.input_layernorm.register_forward_pre_hook(lambda *_, n=number: log.append(f"{n}"))
    with Noted():
        actor.compute_log_prob(own_chunk(make_batch(2), actor.rank, actor.world_size))
    return log


def test_the_next_layer_s_weights_are_prefetched(tiny_dir: Path) -> None:
    rest, layer = "gather", "gather"
    for log in run_kept(2, order_of_gathers, tiny_dir):
        assert log == [rest, layer, layer, "0", "1"]
