"""Expert choices: recorded, replayed, and rejected for some classes of models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.workers.training.rank_layouts import FAMILIES, SIZES
from verl_like.errors import ConfigError
from workers.models.routing import Routers, check_routers

IDS = torch.arange(3, 23)[None]


def model_of(family: str, seed: int = 0, **more: Any) -> Any:
    import transformers

    name, fields = FAMILIES[family]
    torch.manual_seed(seed)
    config = getattr(transformers, name)(**{**SIZES, **fields, **more})
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    return model.eval()


def gradients_of(
    model: Any, routers: Routers, chosen: Tensor | None
) -> tuple[Tensor, list[Tensor]]:
    """Return logits of a pass with these choices, and the gradients of all weights."""
    model.zero_grad()
    with routers.replaying():
        routers.replay(chosen)
        logits = model(IDS, use_cache=False).logits
        logits.square().mean().backward()
    return logits.detach(), [w.grad.clone() for w in model.parameters() if w.grad is not None]


def choices(model: Any) -> Tensor:
    with torch.no_grad(), Routers(model).recording() as passes:
        model(IDS[:, :13], use_cache=False)
        model(IDS[:, 13:], use_cache=False)
        return passes.pop_choices()


all_families = pytest.mark.parametrize("family", ["mixtral", "qwen3-moe", "deepseek-v3", "gpt-oss"])


@all_families
def test_replayed_choices_change_no_bit_of_logits_and_gradients(family: str) -> None:
    """The backward pass recomputes the layers."""
    model = model_of(family)
    check_routers(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    routers = Routers(model)
    with torch.no_grad(), routers.recording() as passes:
        expected = model(IDS, use_cache=False).logits
        recorded = passes.pop_choices()
    assert recorded.dtype == torch.uint8
    assert recorded.shape == (IDS.shape[1], *routers.shape)
    logits, gradients = gradients_of(model, routers, recorded)
    assert torch.equal(logits, expected)
    without, plain = gradients_of(model, routers, None)
    assert torch.equal(without, expected)
    assert all(map(torch.equal, gradients, plain))


@all_families
def test_choices_of_another_router_are_weighted_by_this_one(family: str) -> None:
    model = model_of(family)
    routers = Routers(model)
    others = choices(model_of(family, seed=1))
    assert (choices(model) != others).any()
    with torch.no_grad(), routers.recording() as passes, routers.replaying():
        routers.replay(others)
        changed = model(IDS, use_cache=False).logits
        assert torch.equal(passes.pop_choices(), others)
        flipped = others.flip(-1)
        routers.replay(flipped)
        again = model(IDS, use_cache=False).logits
        routers.replay(None)
        plain = model(IDS, use_cache=False).logits
    torch.testing.assert_close(again, changed, atol=1e-5, rtol=0)
    assert (changed - plain).abs().max() > 1e-3


def test_experts_are_chosen_within_groups_and_replayed_over_all() -> None:
    """DeepSeek's groups are chosen by topk, too: that stays unchanged."""
    sizes = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 2}
    model = model_of("deepseek-v3", **sizes)
    routers = Routers(model)
    everywhere = torch.tensor([0, 7]).expand(IDS.shape[1], *routers.shape)
    with torch.no_grad(), routers.recording() as passes, routers.replaying():
        routers.replay(everywhere)
        model(IDS, use_cache=False)
        assert torch.equal(passes.pop_choices(), everywhere)


def test_recording_and_replaying_leave_no_hooks() -> None:
    model = model_of("mixtral")
    routers = Routers(model)
    with routers.recording(), routers.replaying():
        pass
    assert all("forward" not in vars(router) for router in routers.routers)
    assert not any(part._forward_pre_hooks for part in model.modules())


@pytest.mark.parametrize(
    ("family", "config", "message"),
    [
        ("PhimoeConfig", {"num_local_experts": 4}, "'phimoe' .* in a test of Phimoe"),
        (
            "JambaConfig",
            {"num_experts": 4, "use_mamba_kernels": False},
            "does not have exactly one router with",
        ),
    ],
)
def test_a_class_whose_choices_cannot_be_replayed_is_rejected(
    family: str, config: dict[str, Any], message: str
) -> None:
    import transformers

    family_config = getattr(transformers, family)(**{**SIZES, **config})
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(family_config)
    with pytest.raises(ConfigError, match=message):
        check_routers(model)
