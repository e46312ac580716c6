"""Plan recipes that train on rows (SFT, reward model, DPO): one model, and perhaps a reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from trainer.config.devices import devices_of
from trainer.memory import model_memory, role_models
from trainer.rows.config import RowConfig
from trainer.rows.preflight import largest_pass, longest_row, preflight, role_memories
from trainer.tools.planner.cost import StepRows
from trainer.tools.planner.job import Job, Keys
from workers.memory import RoleMemory
from workers.parallel.sharding import dims_of
from workers.training.role_model import RoleModelSpec


@dataclass(frozen=True, eq=False, kw_only=True)
class RowsJob(Job):
    """A run that trains one model on rows: SFT, reward model or DPO."""

    stages: ClassVar[tuple[str, ...]] = ("update",)
    config: RowConfig
    lengths: Sequence[float]
    """Tokens of rows that are equally likely, the longest last."""

    @property
    def describe_rows(self) -> str:
        """Rows and their lengths in words."""
        sides = "pairs" if self.config.num_sides == 2 else "rows"
        mean = sum(self.lengths) / len(self.lengths)
        return (
            f"{self.config.data.train_batch_size:,} {sides} of {mean:g} tokens per row on average "
            f"(at most {longest_row(self.config):,})"
        )

    def models_in(self, config: RowConfig) -> dict[str, RoleModelSpec]:
        """Return the model of every role; a reference is called only before the first step."""
        return role_models(config)

    def calls(self, role: str) -> Sequence[tuple[str, str]]:
        """Return (stage, method) for every call of the role in a step."""
        return [("update", "update_model")] if self.models[role].trains else []

    def rows(self, role: str) -> StepRows:
        """Return the rows of a step."""
        samples = self.config.data.train_batch_size * self.config.num_sides
        return StepRows(
            samples=samples,
            prompts=0,
            prompt=0.0,
            responses=self.lengths,
            longest=longest_row(self.config),
        )

    def pass_tokens(self, config: RowConfig, model: RoleModelSpec) -> int:
        """Return the tokens of a pass of this model."""
        if config.data.use_dynamic_bsz:
            return config.data.max_token_len_per_gpu
        return (
            config.data.micro_batch_size_per_gpu * self.config.num_sides * longest_row(self.config)
        )

    def smaller_passes(self, role: str) -> list[Keys]:
        """Return keys that make the passes of a trained model smaller, to try."""
        data = self.config.data
        if not data.use_dynamic_bsz:
            items = data.micro_batch_size_per_gpu
            sizes = {max(items // 4, 1), 1} - {items}
            return [{"data.micro_batch_size_per_gpu": size} for size in sizes]
        tokens, fewest = (
            data.max_token_len_per_gpu,
            self.config.num_sides * longest_row(self.config),
        )
        sizes = {max(tokens // 4, fewest), fewest} - {tokens}
        return [{"data.max_token_len_per_gpu": size} for size in sizes]

    def role_memory(self, config: RowConfig, role: str, model: RoleModelSpec) -> RoleMemory:
        """Return the memory of the role in this run, as the run computes it."""
        dims = dims_of(sum(config.resource_pool_spec["pool"]), model.sharding)
        largest = largest_pass(config, model, dims)
        return model_memory(config, role, model, "cuda", largest)

    def memories(self, config: RowConfig) -> list[RoleMemory]:
        """Return the memory of all roles in this run, as the run computes it."""
        return role_memories(config, devices_of(config.trainer).type)

    def check_run(self, config: RowConfig) -> None:
        """Raise the errors of models and memory that the run would raise at its start."""
        preflight(config)

    def axes_are_tried(self, role: str) -> bool:
        """Return whether axes are searched; axes that a reference shares stay unchanged."""
        return len(self.models) == 1 and super().axes_are_tried(role)
