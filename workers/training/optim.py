"""The optimizer, its learning-rate schedule, and one guarded optimizer step.

A step with a non-finite gradient is skipped, counted and reported. A schedule gets the progress
after the warm-up, from 0 to 1, and returns a factor of the peak rate. Its other parameters get
their values from the keys of the same name in the section `optim`.

    @LR_SCHEDULES.register("mine")
    def mine(progress: float, min_lr_ratio: float) -> float: ...
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from verl_like.config_key import select_arguments
from verl_like.errors import ConfigError, WorkerError, nearest
from verl_like.registry import CallSignature, Registry, check_call, signature_of
from workers.models.state import local_shard
from workers.parallel.groups import RankGroups
from workers.training.microbatch import all_reduce

if TYPE_CHECKING:
    from workers.config import OptimConfig

logger = logging.getLogger(__name__)
LRSchedule = Callable[..., float]


def _check_schedule(schedule: Any, subject: str) -> None:
    """Reject a schedule whose first parameter cannot be the progress."""
    signature = signature_of(schedule) if callable(schedule) else None
    names = list(signature.parameters) if signature else []
    check_call(schedule, subject, CallSignature("progress", by_name=names[1:]))


LR_SCHEDULES: Registry[LRSchedule] = Registry(
    "learning-rate schedule",
    _check_schedule,
    "(progress, …) -> factor of the peak rate",
)
"""Names for `optim.lr_scheduler_type`.

    @LR_SCHEDULES.register("quadratic")
    def quadratic(progress, min_lr_ratio):              # progress after the warm-up: 0 to 1
        return max(1 - progress**2, min_lr_ratio)

A further parameter gets the key of its name in `optim`.
"""


@LR_SCHEDULES.register("constant")
def constant(progress: float) -> float:
    """The peak rate until the end.

    Source: verl's `constant`
    """
    return 1.0


@LR_SCHEDULES.register("cosine")
def cosine(progress: float, min_lr_ratio: float) -> float:
    """Half a cosine from the peak rate to `min_lr_ratio` times the peak.

    Source: SGDR without restarts, arXiv 1608.03983
    """
    remaining = 0.5 * (1.0 + math.cos(math.pi * progress))
    return min_lr_ratio + (1.0 - min_lr_ratio) * remaining


@LR_SCHEDULES.register("linear")
def linear(progress: float, min_lr_ratio: float) -> float:
    """A straight line from the peak rate to `min_lr_ratio` times the peak.

    Source: BERT, arXiv 1810.04805, appendix A.2
    """
    return min_lr_ratio + (1.0 - min_lr_ratio) * (1.0 - progress)


@LR_SCHEDULES.register("wsd")
def warmup_stable_decay(progress: float, min_lr_ratio: float, wsd_decay_ratio: float) -> float:
    """The peak rate, then a straight line to `min_lr_ratio` times the peak in the last
    `wsd_decay_ratio` of the update calls after the warm-up.

    Source: MiniCPM (WSD), arXiv 2404.06395; straight line: arXiv 2405.18392
    """
    remaining = min(1.0, (1.0 - progress) / wsd_decay_ratio)
    return min_lr_ratio + (1.0 - min_lr_ratio) * remaining


def lr_factor(step: int, total_steps: int, config: OptimConfig) -> float:
    """Return the factor of the peak rate in update call `step` (from 0): warm-up, then the
    schedule.

        lr = config.lr * lr_factor(step, total_steps, config)

    During the warm-up, the factor rises in equal steps, from `lr_warmup_init_ratio`.
    """
    warmup = num_warmup_steps(config, total_steps)
    if step < warmup:
        first = config.lr_warmup_init_ratio
        if first is None:
            return (step + 1) / (warmup + 1)
        return first + (1 - first) * step / warmup

    schedule = LR_SCHEDULES.look_up(config.lr_scheduler_type)
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    return schedule(progress, **_settings_of(schedule, config))


def num_warmup_steps(config: OptimConfig, total_steps: int) -> int:
    """Return the number of update calls of the warm-up."""
    if config.lr_warmup_steps >= 0:
        return config.lr_warmup_steps
    return int(config.lr_warmup_steps_ratio * total_steps)


def check_optim(config: OptimConfig, section: str) -> None:
    """Reject invalid betas, torch's Muon, and a schedule whose parameter the config lacks."""
    if OPTIMIZERS.look_up(config.optimizer) is torch.optim.Muon:
        raise ConfigError(
            f"{section}.optimizer={config.optimizer} steps only matrices, but models have vectors, "
            f"such as norms. Set {section}.optimizer=Muon, which steps the other weights by AdamW "
            f"({section}.args.matrix_lr is the rate of the matrices)."
        )
    if len(config.betas) != 2 or not all(0 <= beta < 1 for beta in config.betas):
        raise ConfigError(
            f"{section}.betas={list(config.betas)}: it must be two numbers, each from 0 to below 1."
        )
    _settings_of(LR_SCHEDULES.look_up(config.lr_scheduler_type), config)


def _settings_of(schedule: LRSchedule, config: OptimConfig) -> dict[str, Any]:
    """Return the values of a schedule's parameters after the first, from the section `optim`."""
    _, *names = inspect.signature(schedule).parameters
    for name in names:
        if not hasattr(config, name):
            raise ConfigError(
                f"optim.lr_scheduler_type={config.lr_scheduler_type}: its parameter "
                f"{name!r} is not a key of the section "
                f"optim.{nearest(name, vars(config))}"
            )
    return {name: getattr(config, name) for name in names}


SETTINGS = ("lr", "eps", "weight_decay", "betas")
"""Keys of the section `optim` that are passed to a constructor with parameters of these names."""


def _check_optimizer(cls: Any, subject: str) -> None:
    """Reject a constructor that cannot be called with the weights and its `SETTINGS` only."""
    check_call(cls, subject, CallSignature("params", by_name=_settings_taken(cls)))


def _settings_taken(cls: Any) -> list[str]:
    signature = signature_of(cls) if callable(cls) else None
    return [name for name in SETTINGS if signature and name in signature.parameters]


OPTIMIZERS: Registry[Any] = Registry(
    "optimizer",
    _check_optimizer,
    "(weights, lr, eps, weight_decay, betas) -> Optimizer",
)
"""Names for `optim.optimizer`.

    OPTIMIZERS.register("RMSprop")(torch.optim.RMSprop)

All parameters after the weights are optional. A static method `groups_of(module)` of a class
returns the weights as groups. The key `peak_lr` of a group replaces `optim.lr` for it.
"""
OPTIMIZERS.register("AdamW")(torch.optim.AdamW)
OPTIMIZERS.register_path("Muon", "workers.training.muon.Muon")


@OPTIMIZERS.register("AdamWMatrixDecay")
class MatrixDecayAdamW(torch.optim.AdamW):
    """AdamW without weight decay on norms, biases and other vectors."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add the matrices and the vectors as separate groups, the latter without weight decay."""
        parameters = list(param_group["params"])
        matrices = [parameter for parameter in parameters if parameter.dim() >= 2]
        vectors = [parameter for parameter in parameters if parameter.dim() < 2]
        if matrices:
            super().add_param_group({**param_group, "params": matrices})
        if vectors:
            super().add_param_group({**param_group, "params": vectors, "weight_decay": 0.0})


BFLOAT16_WEIGHTS = (
    "dtype=bfloat16 of the model keeps weights and moments in bfloat16, where small steps round to "
    "nothing: five steps of AdamW at lr 1e-6 changed 1.4 % of the weights of a small Llama, but "
    "71 % with float32 weights. Leave dtype at float32 if the memory allows it; passes can still "
    "compute in bfloat16 (compute_dtype)."
)


def build_optimizer(module: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """Return the optimizer over all trained parameters, with the settings that its constructor
    takes.
    """
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if any(parameter.dtype == torch.bfloat16 for parameter in parameters):
        logger.warning(BFLOAT16_WEIGHTS)
    cls = OPTIMIZERS.look_up(config.optimizer)
    groups = cls.groups_of(module) if hasattr(cls, "groups_of") else parameters
    settings: dict[str, Any] = {name: getattr(config, name) for name in _settings_taken(cls)}
    settings |= select_arguments(cls, config.args)
    if "betas" in settings:
        settings["betas"] = (config.betas[0], config.betas[1])
    if isinstance(cls, type) and issubclass(cls, torch.optim.Adam):
        # A fused step is a single pass over memory, with bit-identical results for every sharding.
        # Fused steps of other optimizers do not support sharded weights.
        settings["fused"] = True
    optimizer: torch.optim.Optimizer = cls(groups, **settings)
    return optimizer


@dataclass(frozen=True)
class OptimStepSettings:
    """Settings of one optimizer step that differ from the configuration; None keeps a setting.

    Example:

        OptimStepSettings(lr=1e-6, grad_clip=1.0)

    Args:
        lr: learning rate, instead of the schedule's.
        betas: decay rates of Adam's two moments.
        eps: Adam's epsilon.
        weight_decay: weight decay of the optimizer.
        grad_clip: gradients are clipped to this norm.
        ends_update: True if the learning-rate schedule advances after the step.
    """

    lr: float | None = None
    betas: tuple[float, float] | None = None
    eps: float | None = None
    weight_decay: float | None = None
    grad_clip: float | None = None
    ends_update: bool = True

    @contextmanager
    def applied_to(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Context in which the optimizer has these settings; raise if it does not support one."""
        settings = {name: getattr(self, name) for name in SETTINGS}
        changes = {name: value for name, value in settings.items() if value is not None}
        for name in changes:
            if name not in optimizer.defaults:
                raise ConfigError(
                    f"optim_step: {type(optimizer).__name__} has no setting {name!r}; it has "
                    f"{', '.join(n for n in SETTINGS if n in optimizer.defaults)}."
                )
        if "lr" in changes and any("peak_lr" in group for group in optimizer.param_groups):
            raise ConfigError(
                f"optim_step: {type(optimizer).__name__} has two learning rates, so the rate of a "
                "single step is not supported. Leave out lr, or set optim.optimizer=AdamW."
            )
        before = [{name: group[name] for name in changes} for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group.update(changes)
        try:
            yield
        finally:
            for group, values in zip(optimizer.param_groups, before, strict=True):
                group.update(values)


CONFIGURED = OptimStepSettings()


class Schedule:
    """Sets the learning rate of each of `total_steps` update calls.

    The constructor sets the rate of the first call.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, config: OptimConfig, total_steps: int
    ) -> None:
        self.optimizer = optimizer
        self.config = config
        self.total_steps = total_steps
        self.set_step(0)

    def set_step(self, step: int) -> None:
        """Set the rate of update call `step`, counted from 0."""
        self.num_steps = step
        factor = lr_factor(step, self.total_steps, self.config)
        self.lr = self.config.lr * factor
        for group in self.optimizer.param_groups:
            group["lr"] = group.get("peak_lr", self.config.lr) * factor

    def step(self) -> None:
        """Set the rate of the next update call."""
        self.set_step(self.num_steps + 1)


def guarded_step(
    optimizer: torch.optim.Optimizer,
    parameters: list[nn.Parameter],
    grad_clip: float,
    groups: RankGroups | None = None,
    copies: Sequence[nn.Parameter] = (),
) -> float:
    """Clip gradients by the global norm, take a step, and clear them. Return the unclipped norm.

    If the norm is not finite, the gradients are cleared without a step. `groups` are the groups of
    the module's ranks; None means only this rank. The norm omits the gradients of `copies` here,
    because other ranks count them.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    if groups is None or (groups.model is None and groups.dims.ep == 1):
        # all on one mesh, or plain tensors
        norm: Tensor = nn.utils.get_total_norm(gradients)
        if hasattr(norm, "full_tensor"):  # a DTensor, without importing it into the driver
            norm = norm.full_tensor()
        nn.utils.clip_grads_with_norm_(parameters, grad_clip, norm)
    else:
        # torch's norm does not support several meshes. A gradient that n ranks hold identically
        # counts as an n-th on each. A weight belongs to one pipeline stage only.
        copied = {id(weight) for weight in copies}
        counted = [p.grad for p in parameters if p.grad is not None and id(p) not in copied]
        num_holders = groups.dims.world // groups.dims.pp
        shares = [num_shards(gradient) / num_holders for gradient in counted]
        local = [local_shard(gradient) for gradient in counted]
        norms = torch.stack(torch._foreach_norm(local, dtype=torch.float32))
        total = (norms.square() * norms.new_tensor(shares)).sum()
        norm = all_reduce(total, groups.world).sqrt()
        local = [local_shard(gradient) for gradient in gradients]
        torch._foreach_mul_(local, (grad_clip / (norm + 1e-6)).clamp(max=1.0))

    size = float(norm)
    if math.isfinite(size):
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return size


def num_shards(tensor: Tensor) -> int:
    """Return the number of ranks with different shards of a tensor; other ranks have copies."""
    from torch.distributed.tensor import DTensor, Replicate

    count = 1
    if isinstance(tensor, DTensor):
        for axis, placement in enumerate(tensor.placements):
            if not isinstance(placement, Replicate):
                count *= tensor.device_mesh.size(axis)
    return count


MAX_IN_A_ROW = 5
"""Maximum number of consecutive skipped steps; one more ends the run."""


class NonfiniteGuard:
    """Counts skipped steps, logs their samples, and ends the run if too many are consecutive.

    Checkpoints store the number of skipped steps, in total and in a row.
    """

    def __init__(self, groups: RankGroups) -> None:
        self.groups = groups
        self.total = 0
        self.in_a_row = 0

    def note(self, grad_norm: float, names: list[str]) -> None:
        """Record the norm of a step over the samples `names` of this rank.

        Every rank calls it with the same norm.
        """
        if math.isfinite(grad_norm):
            self.in_a_row = 0
            return

        self.total += 1
        self.in_a_row += 1
        names_by_rank = [names]
        group = self.groups.data
        if group is not None:
            names_by_rank = [[] for _ in range(group.size())]
            dist.all_gather_object(names_by_rank, names, group=group)
        samples = ", ".join(sorted(name for names_here in names_by_rank for name in names_here))

        fact = (
            f"the gradient's norm is {grad_norm}: step skipped. Samples of the mini-batch: "
            f"{samples}."
        )
        if self.in_a_row > MAX_IN_A_ROW:
            raise WorkerError(
                f"{self.in_a_row} steps in a row had a non-finite gradient; the last: {fact} Look "
                "at those samples, lower the learning rate, or continue from an earlier checkpoint."
            )
        if self.groups.is_first:
            logger.warning(
                "%s Skipped steps: %d in a row, %d in total.", fact, self.in_a_row, self.total
            )
