"""Record which experts a model's routers choose in one pass, and replay the choices in another.

    routers = Routers(module)
    with routers.recording() as noted:                 # during a rollout
        module(input_ids=ids)
    chosen = noted.pop_choices()                   # [tokens, layers, choices]

    with routers.replaying():                       # in training
        routers.replay(chosen)                      # until the next call
        module(input_ids=ids).logits.sum().backward()

The choices are recorded from the arguments of the experts. In a replay, the router's `topk` over
all experts returns the recorded choices and the current scores for them. The weights of the
experts, and their gradient, therefore come from the current router.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from verl_like.errors import BatchError, ConfigError
from workers.columns import ROUTED
from workers.config.policy import ROUTING_KEY
from workers.models.causal_lm import ROUTERS, replaced_forward
from workers.models.support import Support
from workers.parallel.fsdp import experts_of


class RecordedChoices:
    """The expert choices of all passes since the last `pop_choices`."""

    def __init__(self, num_layers: int, dtype: torch.dtype) -> None:
        self.layers: list[list[Tensor]] = [[] for _ in range(num_layers)]
        self.dtype = dtype

    def pop_choices(self) -> Tensor:
        """Return the choices of these passes, [tokens, layers, choices], on the CPU."""
        layers = [torch.cat(passes) for passes in self.layers]
        self.layers = [[] for _ in layers]
        return torch.stack(layers, dim=1).to(self.dtype).cpu()


class Routers:
    """The routers of a model, layer by layer."""

    def __init__(self, module: nn.Module) -> None:
        """Find the routers; raise a ConfigError if the model has none."""
        self.experts, self.routers = [], []
        for name, experts in experts_of(module):
            block = module.get_submodule(name.rpartition(".")[0])
            routers = [getattr(block, name) for name in ROUTERS if hasattr(block, name)]
            if len(routers) != 1 or not all(hasattr(routers[0], n) for n in ("weight", "top_k")):
                raise ConfigError(
                    f"{ROUTING_KEY}: {type(block).__name__} does not have exactly one router "
                    "with `weight` and `top_k`, so its choices cannot be replayed. Remove this "
                    "setting."
                )
            self.experts.append(experts)
            self.routers.append(routers[0])
        if not self.routers:
            raise ConfigError(
                f"{ROUTING_KEY}: {type(module).__name__} has no routed experts. Remove this "
                "setting."
            )
        self.num_experts = len(self.routers[0].weight)
        self.shape = len(self.routers), int(self.routers[0].top_k)
        """Number of layers with experts, and of choices per token in each."""
        self.modes = [_Replay(self.num_experts) for _ in self.routers]

    @property
    def no_choices(self) -> Tensor:
        """Empty choices [0, layers, choices], in the smallest dtype that can number the experts."""
        dtype = torch.uint8 if self.num_experts <= 2**8 else torch.int16
        return torch.empty(0, *self.shape, dtype=dtype)

    @contextmanager
    def recording(self) -> Iterator[RecordedChoices]:
        """Context in which the choices of experts are recorded."""
        noted = RecordedChoices(len(self.experts), self.no_choices.dtype)

        def note(layer: int) -> Any:
            return lambda _, args: noted.layers[layer].append(args[1].detach())

        with ExitStack() as stack:
            for layer, experts in enumerate(self.experts):
                stack.callback(experts.register_forward_pre_hook(note(layer)).remove)
            yield noted

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Context in which routers use the choices of `replay`, or their own until it is called."""
        self.replay(None)
        with ExitStack() as stack:
            for router, mode in zip(self.routers, self.modes, strict=True):
                stack.enter_context(_in_mode(router, mode))
            yield
        self.replay(None)

    def replay(self, chosen: Tensor | None) -> None:
        """Set the choices [tokens, layers, choices] of all passes until the next call.

        None, or a choice below 0, lets the routers choose. The choices stay in effect because
        gradient checkpointing runs layers again.
        """
        layers = [None] * len(self.modes) if chosen is None else chosen.long().unbind(dim=1)
        for mode, choices in zip(self.modes, layers, strict=True):
            mode.chosen = choices

    def check(self, chosen: Tensor) -> None:
        """Raise if choices [tokens, layers, choices] do not fit this model's layers or experts."""
        if chosen.shape[1:] != self.shape:
            raise BatchError(
                f"column {ROUTED!r} has [layers, choices] of {list(chosen.shape[1:])} "
                f"per token, but the model's routers choose {list(self.shape)}: it was "
                "recorded with a different model."
            )
        if len(chosen) and not 0 <= int(chosen.min()) <= int(chosen.max()) < self.num_experts:
            raise BatchError(
                f"column {ROUTED!r} names experts {int(chosen.min())} to {int(chosen.max())}, and "
                f"a layer of the model has {self.num_experts}: it was recorded "
                "with a different model."
            )


class _Replay(TorchFunctionMode):
    """Replaces a router's choice among all experts by `chosen` in its forward pass."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.chosen: Tensor | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        chosen = self.chosen
        if func not in (torch.topk, Tensor.topk) or chosen is None:
            return func(*args, **(kwargs or {}))
        scores: Tensor = args[0]
        # a `topk` over groups of experts, which some routers run first, has another shape
        if scores.ndim != 2 or scores.shape[1] != self.num_experts:
            return func(*args, **(kwargs or {}))
        assert len(scores) == len(chosen), (
            f"a router reads {len(scores)} tokens, but {len(chosen)} tokens have choices"
        )
        own_choices = func(*args, **(kwargs or {})).indices
        chosen = torch.where(chosen < 0, own_choices, chosen)
        return torch.return_types.topk((scores.gather(1, chosen), chosen))


def _in_mode(module: nn.Module, mode: TorchFunctionMode) -> AbstractContextManager[None]:
    """Context in which the module computes in this mode."""
    forward = module.forward

    def computed(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return forward(*args, **kwargs)

    return replaced_forward(module, computed)


def check_routers(module: Any) -> None:
    """Reject a model, on any device, whose choices cannot be recorded or replayed."""
    Routers(module)
    config = module.config
    reason = Support.of(config).why_not("replay")
    if reason:
        raise ConfigError(
            f"{ROUTING_KEY}: the experts that a model of type {config.model_type!r} chooses cannot "
            f"be replayed: {reason}. Remove this setting."
        )
