"""Plan recipes that train on rows (SFT, reward model, DPO): one model, and perhaps a reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from trainer.rows.config import RowConfig
from trainer.rows.preflight import longest_row, pass_tokens, preflight, role_memories
from trainer.tools.planner.cost import StepRows
from trainer.tools.planner.job import Job, Keys
from workers.memory import RoleMemory


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

    def pass_tokens(self, config: RowConfig, role: str, method: str) -> int:
        """Return the tokens of a pass of this call."""
        return pass_tokens(config, longest_row(self.config))

    def smaller_passes(self, role: str) -> list[Keys]:
        """Return keys that make the passes of a trained model smaller, to try."""
        data, key, fewest = self.config.data, "micro_batch_size_per_gpu", 1
        if data.use_dynamic_bsz:
            key, fewest = "max_token_len_per_gpu", self.config.num_sides * longest_row(self.config)
        now = getattr(data, key)
        sizes = {max(now // 4, fewest), fewest} - {now}
        return [{f"data.{key}": size} for size in sizes]

    def memories(self, config: RowConfig) -> list[RoleMemory]:
        """Return the memory of all roles in this run, as the run computes it."""
        return role_memories(config, "cuda")

    def check_run(self, config: RowConfig) -> None:
        """Raise the errors of models and memory that the run would raise at its start."""
        preflight(config)

    def axes_are_tried(self, role: str) -> bool:
        """Return whether axes are searched; axes that a reference shares stay unchanged."""
        return len(self.models) == 1 and super().axes_are_tried(role)
