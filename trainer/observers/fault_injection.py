"""Fault injection (`faults.*`) from a seed: kill workers, delay calls, lose weights.

One `FaultInjection` watches all attempts of a run. With equal settings, the faults of a step depend
only on its number. Each fault is injected only once: when a step is repeated after a restart, its
earlier faults are left out.

`faults.jsonl` in the run folder lists the faults. After a completed run, its last line accounts for
the steps and, with the sample log, for their samples:

    started = completed + repeated + unfinished
    made = trained + dropped (by reason)
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

from trainer.config.schema import RunConfig
from trainer.groups.worker_groups import WorkerGroups
from trainer.observers.sample_log import STEP_NOT_FINISHED, SampleWatch
from trainer.report.accounts import FAULTS_FILE, LEDGER, OUTCOMES
from verl_like.batch.protocol import DataProto
from verl_like.errors import SampleLogError, WorkerDiedError
from verl_like.files import json_line, json_objects

logger = logging.getLogger(__name__)


class FaultInjection:
    """Injects the faults of one run, and accounts for its steps."""

    def __init__(self, config: RunConfig, samples: SampleWatch | None = None) -> None:
        """`samples` is the run's `SampleWatch`; without it, only steps are accounted for."""
        self._settings, self._samples = config.injected_faults, samples
        self._folder = Path(config.trainer.default_local_dir)
        self._struck: set[tuple[str, int]] = set()
        self._first: int | None = None
        """The last step before the run began."""
        self._started: list[int] = []
        """The steps that this attempt has started."""
        self._num_started = self._num_repeated = 0

    def on_init_end(self, trainer: Any) -> None:
        """Begin an attempt, which continues after the trainer's current step."""
        if not self._settings.has_faults:
            return
        step = trainer.global_step
        if self._first is None:
            self._first = step
            if step == 0:
                (self._folder / FAULTS_FILE).unlink(missing_ok=True)
        self._num_repeated += sum(1 for started in self._started if started > step)
        self._started = []

    def on_step_begin(self, trainer: Any) -> None:
        """Inject the faults of the step."""
        if not self._settings.has_faults:
            return
        groups, step = trainer.groups, trainer.global_step
        self._started.append(step)
        self._num_started += 1
        if rng := self._rng("delay", self._settings.delay_call, step):
            # rank 0 of a role sleeps, which delays its next calls and all calls that depend on them
            role, seconds = rng.choice(sorted(groups)), self._settings.delay_s
            with suppress(WorkerDiedError):  # a lost worker needs no delay
                groups[role].execute_func_rank_zero.remote(time.sleep, seconds)
            self.note("delay_call", step, role=role, rank=0, seconds=seconds)
        if self._rng("drop_bucket", getattr(self._settings, "drop_weight_bucket", 0.0), step):
            groups["actor"].drop_next_bucket()
            self.note("drop_weight_bucket", step, role="actor")
        if rng := self._rng("kill_worker", self._settings.kill_worker, step):
            self._kill(groups, step, rng)

    def on_generated(self, trainer: Any, batch: DataProto) -> None:
        """Record the faults that occurred in the environments of these samples."""
        kinds = Counter[str]()
        for info in batch.non_tensor_batch.get("trajectory", ()):
            kinds.update(info.get("faults", {}))  # padding rows have none
        for kind, count in kinds.items():
            self.note(kind, trainer.global_step, count=count)

    def at_end(self) -> None:
        """Write the account of steps and samples; raise if a step is missing or occurs twice."""
        if self._first is None:
            return
        lines, _ = json_objects(self._folder / "metrics.jsonl")
        steps = [int(line["step"]) for line in lines]
        done = [step for step in steps if step > self._first]
        unfinished = [step for step in self._started[-1:] if step not in done]
        outcomes = dict(
            zip(OUTCOMES, (len(done), self._num_repeated, len(unfinished)), strict=True)
        )
        in_order = done == list(range(self._first + 1, self._first + 1 + len(done)))
        if not in_order or self._num_started != sum(outcomes.values()):
            counts = " + ".join(f"{count} {outcome}" for outcome, count in outcomes.items())
            raise SampleLogError(
                f"the steps of a run with injected faults do not add up: {self._num_started} were "
                f"started ({counts}), but metrics.jsonl has steps {done} after step {self._first}. "
                f"The faults are in {self._folder / FAULTS_FILE}."
            )
        extra = {}
        if self._samples is not None:
            self._samples.log.drop_after(self._first + len(done), STEP_NOT_FINISHED)
            if totals := self._samples.log.totals():
                extra = {"samples": totals}
        self._write({"kind": LEDGER, "started": self._num_started, **outcomes, **extra})

    def _rng(self, kind: str, chance: float, step: int) -> Random | None:
        """Return the random generator of a fault in this step, or None if there is no new fault."""
        rng = Random(f"{self._settings.seed}/{kind}/{step}")
        if rng.random() >= chance or (kind, step) in self._struck:
            return None
        self._struck.add((kind, step))
        return rng

    def _kill(self, groups: WorkerGroups, step: int, rng: Random) -> None:
        """Kill a worker process of a randomly chosen pool, but never the driver."""
        by_pool: dict[int, list[tuple[str, int]]] = {}
        for role in groups:
            transport = groups[role].transport
            if transport.process_key not in by_pool:
                ranks = range(transport.world_size) if transport.can_kill else ()
                by_pool[transport.process_key] = [(role, rank) for rank in ranks]
        role, rank = rng.choice(rng.choice([ranks for ranks in by_pool.values() if ranks]))
        transport = groups[role].transport
        self.note("kill_worker", step, role=role, rank=rank, place=transport.place(rank))
        transport.kill(rank)

    def note(self, kind: str, step: int, **fields: Any) -> None:
        """Record and log a fault in this step."""
        self._write({"kind": kind, "step": step, **fields})
        words = ", ".join(f"{name} {value}" for name, value in fields.items())
        logger.warning("faults.%s in step %d: %s", kind, step, words)

    def _write(self, line: dict[str, Any]) -> None:
        with (self._folder / FAULTS_FILE).open("a", encoding="utf-8") as file:
            file.write(json_line(line))
