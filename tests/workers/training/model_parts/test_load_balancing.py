"""The load-balancing loss of experts: its value, and its invariances."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.workers.gradients import ACTOR_COLUMNS, Gradients, gradients, loss_of
from tests.workers.kept_ranks import run_kept
from tests.workers.samples import learned, make_batch, own_chunk, started, tiny_config
from tests.workers.training.rank_layouts import saved
from verl_like.errors import ConfigError
from workers.models.load import load_model
from workers.parallel import sharding
from workers.roles.actor import ActorWorker
from workers.training.engine import INPUTS
from workers.training.loss import Loss
from workers.training.microbatch import (
    Columns,
    MicroBatchBudget,
    MiniBatch,
    Rows,
    floats,
    mini_batch,
)
from workers.training.model_parts.load_balancing import check_routers, load_balancing_loss

NUM_EXPERTS, NUM_CHOSEN = 4, 2


@pytest.fixture(scope="module")
def experts_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small Qwen3-MoE whose routers prefer some experts."""
    return saved(tmp_path_factory.mktemp("experts"), "qwen3-moe", initializer_range=0.5)


def actor_of(folder: Path, packed: bool = True, **actor: Any) -> ActorWorker:
    settings = {"router_aux_loss_coef": 0.5, "ppo_mini_batch_size": 6, **actor}
    config = tiny_config(folder, model={"use_remove_padding": packed}, **settings)
    return started(ActorWorker, config, 10)


def logits_by_layer(folder: Path) -> list[torch.Tensor]:
    """Return transformers' router logits of each row, up to the last token read."""
    model = load_model(tiny_config(folder).actor_rollout_ref.model, "token")
    batch = make_batch(6).batch
    layers: list[list[torch.Tensor]] = [[], []]
    for tokens, mask in zip(batch["input_ids"], batch["attention_mask"].bool(), strict=True):
        row = tokens[mask][None, :-1]  # the last token is not read
        logits = model(input_ids=row, use_cache=False, output_router_logits=True).router_logits
        for layer, of_row in zip(layers, logits, strict=True):
            layer.append(of_row.detach())
    return [torch.cat(layer) for layer in layers]


def loss_twin(layers: list[torch.Tensor]) -> float:
    """Compute the definition, token by token in float64."""
    total = 0.0
    for layer in layers:
        chosen, mass = [0.0] * NUM_EXPERTS, [0.0] * NUM_EXPERTS
        for token in layer.double().softmax(dim=-1).tolist():
            ranked = sorted(range(NUM_EXPERTS), key=lambda expert: -token[expert])
            for expert in ranked[:NUM_CHOSEN]:
                chosen[expert] += 1 / len(layer)
            for expert in range(NUM_EXPERTS):
                mass[expert] += token[expert] / len(layer)
        total += NUM_EXPERTS * sum(f * p for f, p in zip(chosen, mass, strict=True))
    return total / len(layers)


def test_the_metric_matches_the_definition_over_the_mini_batch(experts_dir: Path) -> None:
    metrics = actor_of(experts_dir).update_actor(make_batch(6))
    expected = loss_twin(logits_by_layer(experts_dir))
    assert expected > NUM_CHOSEN + 0.05  # the routers are not balanced
    assert metrics["actor/router_aux_loss"] == pytest.approx(expected, rel=1e-5)


def test_the_loss_of_one_layer_matches_transformers(experts_dir: Path) -> None:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    layer = logits_by_layer(experts_dir)[0]
    chosen = layer.topk(NUM_CHOSEN).indices.flatten()
    shares = torch.bincount(chosen, minlength=NUM_EXPERTS)[None] / len(layer)
    ours = load_balancing_loss([layer], shares, len(layer), 1)
    theirs = load_balancing_loss_func((layer,), NUM_EXPERTS, NUM_CHOSEN)
    torch.testing.assert_close(ours, theirs)


def router_gradients(actor: ActorWorker, rows: int) -> Gradients:
    return gradients(actor, make_batch(6), ACTOR_COLUMNS, MicroBatchBudget(rows=rows))


@pytest.mark.parametrize(
    "changes",
    [{"packed": False}, {"checkpointing": True}],
    ids=["padded", "checkpointing"],
)
def test_the_gradient_does_not_depend_on_the_micro_batch_cut(
    experts_dir: Path, changes: dict[str, bool]
) -> None:
    whole = router_gradients(actor_of(experts_dir), 6)
    actor = actor_of(experts_dir, packed=changes.get("packed", True))
    if changes.get("checkpointing"):
        actor.engine.module.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": False}
        )
        actor.engine.module.train()
    for rows in (1, 4):
        cut = router_gradients(actor, rows)
        for name, gradient in whole.items():
            assert (cut[name] - gradient).norm() <= 1e-5 * gradient.norm(), name


def log_likelihood(outputs: Columns, columns: Columns, batch: MiniBatch) -> Any:
    loss = -outputs["log_probs"].sum() / batch.num_tokens
    return loss, {"likelihood": loss}


def test_rows_with_another_loss_are_not_counted(experts_dir: Path) -> None:
    actor = actor_of(experts_dir)
    engine, names = actor.engine, (*INPUTS, *ACTOR_COLUMNS)
    ours, others = (
        mini_batch(Rows.from_batch(make_batch(6, seed), names), 0, 1, None) for seed in (0, 1)
    )
    results = []
    data, text = make_batch(6), Loss("text", log_likelihood, is_balanced=False)
    for further in ([], [(others, text)]):
        with engine.running(engine.optimizer):
            metrics = engine.forward_backward(ours, MicroBatchBudget(rows=2), loss_of(actor, data))
            for batch, loss in further:
                metrics |= engine.forward_backward(batch, MicroBatchBudget(rows=2), loss)
            results.append(floats(metrics))
    one, both = results
    assert both.keys() - one.keys() == {"likelihood"}
    assert both["router_aux_loss"] == pytest.approx(one["router_aux_loss"], rel=1e-6)


def test_the_coefficient_scales_the_gradient(experts_dir: Path) -> None:
    none, half, one = (
        router_gradients(actor_of(experts_dir, router_aux_loss_coef=coef), 6)
        for coef in (0.0, 0.5, 1.0)
    )
    name = "model.layers.0.mlp.gate.weight"
    assert (one[name] - none[name]).norm() > 1e-3
    torch.testing.assert_close(
        one[name] - none[name], 2 * (half[name] - none[name]), rtol=1e-3, atol=1e-6
    )


def updated(folder: str, is_large: bool = False) -> dict[str, float]:
    """Do an update in which ranks have unequal numbers of rows and passes."""
    if is_large:
        sharding.SMALL_ELEMENTS = 0
    actor = actor_of(Path(folder), ppo_mini_batch_size=5, ppo_micro_batch_size_per_gpu=2)
    batch = own_chunk(make_batch(5), actor.rank, actor.world_size)
    return learned(actor.update_actor(batch))


def test_two_ranks_have_the_loss_of_one(experts_dir: Path) -> None:
    one_rank = updated(str(experts_dir))
    for metrics in run_kept(2, updated, str(experts_dir), True):
        assert metrics == pytest.approx(one_rank, rel=1e-4, abs=1e-6)


def test_updates_balance_the_experts(experts_dir: Path) -> None:
    actor = actor_of(experts_dir, router_aux_loss_coef=1.0)
    batch = make_batch(6)
    batch.batch["advantages"].zero_()
    losses = [actor.update_actor(batch)["actor/router_aux_loss"] for _ in range(4)]
    assert losses[-1] < losses[0] - 0.01


def test_a_batch_without_responses_has_no_loss(experts_dir: Path) -> None:
    batch = make_batch(6)
    batch.batch["response_mask"].zero_()
    metrics = actor_of(experts_dir).update_actor(batch)
    assert metrics["actor/router_aux_loss"] == metrics["actor/grad_norm"] == 0.0


def test_a_model_without_experts_is_rejected(
    tiny_dir: Path,
) -> None:
    with pytest.raises(ConfigError, match="has no load-balancing loss for model type 'llama'"):
        check_routers(str(tiny_dir / "model"))
    with pytest.raises(ConfigError, match="router_aux_loss_coef is set, but.*'llama'"):
        actor_of(tiny_dir)
