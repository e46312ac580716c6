"""Recipes on rows on cards: one model that is trained, and perhaps a reference."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from trainer.config.devices import devices_of
from trainer.launch import trainer_class
from trainer.planner.cost import Rows
from trainer.planner.job import Job, Passes
from trainer.preference.recipe import DPO
from trainer.reward_model.recipe import REWARD_MODEL
from trainer.rows.config import RowConfig
from trainer.rows.preflight import held_models, longest_row, preflight, role_memories
from trainer.sft.recipe import SFT
from workers.memory import HeldModel, RoleMemory

TOKENS, SAMPLES = "data.max_token_len_per_gpu", "data.micro_batch_size_per_gpu"


@dataclass(frozen=True, eq=False, kw_only=True)
class RowsJob(Job):
    """A run that trains on rows of a file."""

    stages: ClassVar[tuple[str, ...]] = ("update",)
    model_key: ClassVar[str] = "model"
    config: RowConfig
    lengths: Sequence[float]
    """Tokens of rows that are equally likely, the longest last."""

    @property
    def rows_in_words(self) -> str:
        """Rows and their lengths."""
        rows, items = self._rows, self.config.data.train_batch_size
        sides = " pairs" if self.num_sides == 2 else " rows"
        return (
            f"{items:,}{sides} a step, {rows.tokens:g} tokens a row "
            f"(at most {longest_row(self.config):,})"
        )

    @functools.cached_property
    def num_sides(self) -> int:
        """Rows of an item of the data."""
        sides: int = trainer_class(self.config).num_sides(self.config)  # type: ignore[attr-defined]
        return sides

    @functools.cached_property
    def models(self) -> dict[str, HeldModel]:
        """Role -> its model; that of a reference is called before the first step alone."""
        return held_models(self.config)

    def memories(self, config: RowConfig) -> list[RoleMemory]:
        """As a run counts them."""
        return role_memories(config, self.num_sides, devices_of(config.trainer).type)

    def check_run(self, config: RowConfig) -> None:
        """By all that a run looks at before it takes a device."""
        preflight(config, self.num_sides)

    @functools.cached_property
    def _rows(self) -> Rows:
        samples = self.config.data.train_batch_size * self.num_sides
        return Rows(samples=samples, prompts=0, prompt=0.0, responses=self.lengths)

    @functools.cache  # noqa: B019 - a job lives as long as its plan
    def passes(self, role: str) -> Passes:
        """By tokens or by items, as the run cuts them."""
        data, sides = self.config.data, self.num_sides
        held, width = self.models[role], longest_row(self.config)
        tokens, items = data.max_token_len_per_gpu, data.micro_batch_size_per_gpu
        fewest = sides * width
        if data.use_dynamic_bsz:
            sizes = {size: size for size in (tokens, max(tokens // 4, fewest), fewest)}
        else:
            sizes = {size: size * fewest for size in (items, max(items // 4, 1), 1)}
        return Passes(
            calls=[("update", "update_model")] if held.trains else [],
            rows=self._rows,
            at_once=self._rows.samples,
            width=width,
            read_share=1.0 if held.head == "token" else 1 / width,
            size_key=TOKENS if data.use_dynamic_bsz else SAMPLES,
            sizes=sizes if held.trains else {next(iter(sizes)): next(iter(sizes.values()))},
            model_key=self.model_key,
            fsdp_key=f"{self.model_key}.fsdp_config",
        )

    def may(self, key: str, now: Any, others: Collection[Any]) -> list[Any]:
        """The values of a key that are tried; axes that a reference shares stay as they are."""
        is_shared = len(self.models) > 1 and key.startswith("parallel.")
        return [now] if is_shared else super().may(key, now, others)


class SFTJob(RowsJob):
    """Supervised fine-tuning."""

    recipe: ClassVar = SFT


class RewardModelJob(RowsJob):
    """A reward model of pairs."""

    recipe: ClassVar = REWARD_MODEL


class PreferenceJob(RowsJob):
    """DPO and its kin."""

    recipe: ClassVar = DPO
