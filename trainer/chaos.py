"""Faults on purpose (`chaos.*`), drawn from a seed: workers killed, calls delayed, and what else a
recipe's trainer names (`Trainer.own_faults`).

`trainer.launch.run` makes one `Chaos` for all attempts of a run, and the loop tells it of every
attempt and of every step that begins. Which faults a step has follows from `chaos.seed` and the
step alone. Each comes once: a step that is made again after a restart is spared those that it had.

`chaos.jsonl` of the run folder has a line a fault, and at the end the ledger of the steps:

    begun = kept + made again + not finished

and that of the samples of these steps, where the recipe makes some:

    made = trained + dropped (by reason)

A recipe counts where it makes samples and where it hands them to an update, each on its own, so
that a sample that is lost or doubled between the two shows.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from trainer.config.schema import RunConfig
from trainer.groups.worker_groups import WorkerGroups
from trainer.report.disturbances import CHAOS_FILE, LEDGER, OUTCOMES
from verl_like.errors import LedgerError, WorkerDiedError
from verl_like.files import json_line, json_objects

MADE, TRAINED = "made", "trained"
logger = logging.getLogger(__name__)


class SampleLedger:
    """Counts of a run's samples by step; a step that is made again counts its samples again."""

    def __init__(self) -> None:
        self._steps: dict[int, Counter[str]] = {}
        self._lost: Counter[str] = Counter()
        """Of steps that came to nothing."""

    def count(self, step: int, became: dict[str, int]) -> None:
        """So many samples of the step were `MADE`, `TRAINED`, or dropped for a reason."""
        self._steps.setdefault(step, Counter()).update(became)

    def drop_after(self, step: int, reason: str) -> None:
        """What later steps made came to nothing."""
        for later in [number for number in self._steps if number > step]:
            num_made = self._steps.pop(later)[MADE]
            self._lost.update({MADE: num_made, reason: num_made})

    def close(self) -> dict[str, Any]:
        """The whole run's numbers, none where no samples were made; raise if a step's do not add
        up.
        """
        for step, became in self._steps.items():
            if 2 * became[MADE] != became.total():
                raise LedgerError(
                    f"the samples of step {step} of a run with faults on purpose do not add up: "
                    f"{became.pop(MADE)} were made, {dict(became)}."
                )
        total = sum(self._steps.values(), +self._lost)
        if not total:
            return {}
        made, trained = total.pop(MADE), total.pop(TRAINED, 0)
        return {MADE: made, TRAINED: trained, "dropped": dict(total)}


@dataclass(frozen=True)
class Fault:
    """A fault that only runs of one recipe can have."""

    kind: str
    """Its key in the section `chaos`."""
    chance: float
    """Its chance per step."""
    strike: Callable[[], dict[str, Any]]
    """Brings it about, and says whom it struck: further fields of its line in `chaos.jsonl`."""


class Chaos:
    """The faults of one run, and what became of its steps."""

    def __init__(self, config: RunConfig) -> None:
        self.samples = SampleLedger()
        """Of the run's steps; a recipe counts."""
        self._settings = config.chaos
        self._folder = Path(config.trainer.default_local_dir)
        self._struck: set[tuple[str, int]] = set()
        self._first: int | None = None
        """The step after which the run began."""
        self._begun: list[int] = []
        """Steps of this attempt."""
        self._num_begun = self._made_again = 0

    def begin_attempt(self, step: int) -> None:
        """Models are there, and the run goes on after `step`."""
        if not self._settings.has_faults:
            return
        if self._first is None:
            self._first = step
            if step == 0:
                (self._folder / CHAOS_FILE).unlink(missing_ok=True)
        self._made_again += sum(1 for begun in self._begun if begun > step)
        self._begun = []
        self.samples.drop_after(step, "step made again")

    def before_step(
        self, groups: WorkerGroups, step: int, own_faults: Iterable[Fault] = ()
    ) -> None:
        """The faults of a step that begins; `own_faults` are those that its recipe has besides."""
        if not self._settings.has_faults:
            return
        self._begun.append(step)
        self._num_begun += 1
        if draw := self._draw("delay", self._settings.delay, step):
            self._delay(groups, step, draw)
        for fault in own_faults:
            if self._draw(fault.kind, fault.chance, step):
                self.note(fault.kind, step, **fault.strike())
        if draw := self._draw("kill_worker", self._settings.kill_worker, step):
            self._kill(groups, step, draw)

    def close(self) -> None:
        """Write the ledger of a run that came to its end; raise if a step is lost or doubled."""
        if self._first is None:
            return
        kept = [step for step in _steps_of(self._folder) if step > self._first]
        unfinished = [step for step in self._begun[-1:] if step not in kept]
        became = dict(zip(OUTCOMES, (len(kept), self._made_again, len(unfinished)), strict=True))
        in_order = kept == list(range(self._first + 1, self._first + 1 + len(kept)))
        if not in_order or self._num_begun != sum(became.values()):
            raise LedgerError(
                f"the steps of a run with faults on purpose do not add up: {self._num_begun} were "
                f"begun, {became}; metrics.jsonl has steps {kept} after step {self._first}. The "
                f"faults are in {self._folder / CHAOS_FILE}."
            )
        self.samples.drop_after(self._first + len(kept), "step not finished")
        samples = self.samples.close()
        more = {"samples": samples} if samples else {}
        self._write({"kind": LEDGER, "begun": self._num_begun, **became, **more})

    def _draw(self, kind: str, chance: float, step: int) -> Random | None:
        """What decides the rest, where the step has a fault of this kind that it has not had."""
        draw = Random(f"{self._settings.seed}/{kind}/{step}")
        if draw.random() >= chance or (kind, step) in self._struck:
            return None
        self._struck.add((kind, step))
        return draw

    def _delay(self, groups: WorkerGroups, step: int, draw: Random) -> None:
        """Rank 0 of a role sleeps; its next calls wait, and whoever needs them."""
        role, seconds = draw.choice(sorted(groups)), self._settings.delay_s
        with suppress(WorkerDiedError):  # whoever is gone is slow already
            groups[role].execute_func_rank_zero.remote(time.sleep, seconds)
        self.note("delay", step, role=role, rank=0, seconds=seconds)

    def _kill(self, groups: WorkerGroups, step: int, draw: Random) -> None:
        """A process that is not the driver's own, of a pool that is drawn first."""
        role, rank = draw.choice(draw.choice(_pools_to_kill_in(groups)))
        transport = groups[role].transport
        self.note("kill_worker", step, role=role, rank=rank, place=transport.place(rank))
        transport.kill(rank)

    def note(self, kind: str, step: int, **facts: Any) -> None:
        """A fault has come in this step."""
        self._write({"kind": kind, "step": step, **facts})
        words = ", ".join(f"{name} {value}" for name, value in facts.items())
        logger.warning("chaos.%s in step %d: %s", kind, step, words)

    def _write(self, line: dict[str, Any]) -> None:
        with (self._folder / CHAOS_FILE).open("a", encoding="utf-8") as file:
            file.write(json_line(line))


def _pools_to_kill_in(groups: WorkerGroups) -> list[list[tuple[str, int]]]:
    """Of every pool its worker processes on all machines: a role, and its rank."""
    by_pool: dict[int, list[tuple[str, int]]] = {}
    for role in groups:
        transport = groups[role].transport
        if transport.process_key not in by_pool:
            ranks = range(transport.world_size) if transport.can_kill else ()
            by_pool[transport.process_key] = [(role, rank) for rank in ranks]
    return [processes for processes in by_pool.values() if processes]


def _steps_of(folder: Path) -> list[int]:
    """The steps that `metrics.jsonl` has lines of, in its order."""
    lines, _ = json_objects(folder / "metrics.jsonl")
    return [int(line["step"]) for line in lines]
