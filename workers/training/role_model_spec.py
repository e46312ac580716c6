"""The model of a role, from which its engine is built and its memory estimated.

class TeacherWorker(Worker):
    @classmethod
    def role_model(cls, config, role) -> RoleModelSpec: ...

engine = ScoreTrainEngine(TeacherWorker.role_model(config, "teacher"))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from workers.config.model import FrozenFSDPConfig, ModelConfig, ParallelConfig
from workers.models.causal_lm import Head
from workers.models.memory_shapes import described_by, meta_model
from workers.parallel.sharding import Sharding, axes_key, resolve_sharding

_meta_modules: dict[str, Any] = {}
"""Modules on the meta device, by model, head, and whether they are trained."""
EngineT = TypeVar("EngineT")


@dataclass(frozen=True)
class RoleModelSpec:
    """Description of a role's model, from which its engine is built and its memory estimated.

        RoleModelSpec("verifier.path", ModelConfig(path="models/verifier"), head="score")

    Args:
        key: the configuration key with the model's folder.
        model: the model's section.
        fsdp: sharding and offloading.
        strategy: a value of `actor.strategy`.
        head: "token" for a language model, "scalar" for values per position, "score" per row.
        parallel: sizes of the parallel axes; None: only data-parallel ranks.
        trains: True if the role has gradients and an optimizer.
        quantization: "int8" or "nf4" if frozen linear weights are stored in this format.
        has_average: True if the role has a float32 moving average of the weights.
        saved: the parts of a checkpoint, such as "model" and "optimizer".
        section: the configuration section that contains `fsdp_config`, for messages.
        rows: samples per pass without gradients, if passes are limited by samples.
        tokens: tokens per pass, if the role has its own key for them.
        trained_rows: samples per pass with gradients, if passes are limited by samples.
        mini_batch: samples per optimizer step; None: all samples of an update.
        epochs: passes of an update over its samples.
        replays_routing: True if tokens go to the experts that their rows name.
        router_aux_loss_coef: weight of the load-balancing loss of a mixture of experts.
    """

    key: str
    model: ModelConfig
    fsdp: FrozenFSDPConfig = field(default_factory=FrozenFSDPConfig)
    strategy: str = "fsdp"
    head: Head = "token"
    parallel: ParallelConfig | None = None
    trains: bool = False
    quantization: str | None = None
    has_average: bool = False
    saved: Sequence[str] = ()
    section: str = ""
    rows: int | None = None
    tokens: int | None = None
    trained_rows: int | None = None
    mini_batch: int | None = None
    epochs: int = 1
    replays_routing: bool = False
    router_aux_loss_coef: float = 0.0

    @property
    def sharding(self) -> Sharding:
        """The distribution of the model over the role's ranks."""
        key = self._fsdp_key
        return resolve_sharding(self.strategy, self.fsdp, self.parallel, key, self.quantization)

    @property
    def axes_key(self) -> str:
        """The name of the model's `parallel` section."""
        return axes_key(self._fsdp_key)

    @property
    def _fsdp_key(self) -> str:
        return f"{self.section}.fsdp_config".lstrip(".")

    @property
    def meta_module(self) -> Any:
        """The module on the meta device; callers share it and must not change it."""
        model = self.model
        key = repr((model, self.head, self.trains, described_by(model)))
        if key not in _meta_modules:
            module = meta_model(model, self.head)
            _meta_modules[key] = module if self.trains else module.requires_grad_(False)
        return _meta_modules[key]

    def engine(self, engine_class: Callable[..., EngineT], **settings: Any) -> EngineT:
        """Return `engine_class(self, **settings)`; call `build(worker)` next.

        `engine_class` is `ScoreTrainEngine` or another `TrainEngine`.
        """
        return engine_class(self, **settings)
