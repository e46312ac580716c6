"""The work of a server: the API queues it, and the main thread runs it on the worker groups.

    requests ──> api (event loop's thread) ──> queue ──> this thread: actor      (training)
                                                    └──> rollout                 (samples)

The main thread runs the requests that train, save or load, one after the other. If rollout and
actor share processes, samples run in the main thread between these requests. Otherwise samples run
in their own thread, at the same time as training; when they need the actor, the two take turns
(`TrainingOps.using`).
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from trainer.data.lm_rows import stop_tokens
from trainer.data.prompts import load_tokenizer
from trainer.groups.worker_groups import WorkerGroups
from trainer.launch import reproducible_arithmetic
from trainer.ppo.preparation import worker_code
from trainer.run_folder.folder import FolderLock
from trainer.serve.bodies import JsonObject
from trainer.serve.checkpoints import ServedCheckpoints
from trainer.serve.pending import PendingResult, RequestError
from trainer.serve.rows import Limits
from trainer.serve.sampling import SampleRequest, SamplingLoop
from trainer.serve.training_ops import TrainingOps
from trainer.threads import with_threads
from workers.models.folder import model_folder, read_hf_config

logger = logging.getLogger(__name__)
SLICE_S = 0.05
"""Samples run in slices of this many seconds; training requests run between slices."""
Jobs = queue.SimpleQueue[Callable[[], object]]


class WorkQueue:
    """The queues of work, and what the API needs to know about the base model."""

    def __init__(self, config: Any, groups: Any, aliases: Mapping[str, str]) -> None:
        path, data = config.actor_rollout_ref.model.path, config.data
        folder = model_folder(path, weights=False)
        tokenizer = load_tokenizer(path)
        vocabulary = read_hf_config(folder).get_text_config().vocab_size
        self.base_model: str = path
        self.names = {path, str(folder), folder.name}
        """The names by which clients can refer to the base model."""
        self.aliases = aliases
        self.notice = "; ".join(
            f"the loss {name} is computed as {other} by this server"
            for name, other in aliases.items()
        )
        longest = data.max_prompt_length, data.max_response_length
        self.limits = Limits(vocabulary, *longest, str(folder))
        self.eos = tuple(stop_tokens(tokenizer, path))
        self.checkpoints = ServedCheckpoints(Path(config.trainer.default_local_dir))
        self.checkpoints.remove_leftovers()
        self.ops = TrainingOps(config, groups, self.checkpoints)
        self.sampling = SamplingLoop(self.ops, tokenizer.pad_token_id)
        self.overlaps = not self.ops.rollout.shares_processes_with(self.ops.actor)
        self._work: Jobs = queue.SimpleQueue()
        self._samples: Jobs = queue.SimpleQueue() if self.overlaps else self._work
        self._is_over = False

    def role_of(self, name: str | None) -> str:
        """Return the role that a client means by this name of a base model."""
        if name in self.names:
            return "actor"
        if name is None or name not in self.ops.scorers:
            names = ", ".join([self.base_model, *self.ops.scorers])
            raise RequestError(f"this server has no model {name!r}; it has {names}.")
        return name

    def work(self, pending: PendingResult, run: Callable[[], bytes | JsonObject]) -> None:
        """Queue a call for the main thread; `pending` gets its result."""

        def job() -> None:
            try:
                pending.resolve(run())
            except Exception as error:  # noqa: BLE001 - it goes to the client that asked
                logger.debug("a request failed", exc_info=True)
                pending.fail(error)

        self._work.put(job)

    def drop(self, states: Collection[str]) -> None:
        """Queue the deletion of states behind the work that is already queued."""
        self._work.put(partial(self.ops.drop, states))

    def sample(self, request: SampleRequest) -> None:
        """Queue a sample request."""
        self._samples.put(partial(self.sampling.add, request))

    def run(self) -> None:
        """Run queued work until `stop`, in the main thread."""
        sampler = threading.Thread(target=self._run, args=[self._samples], daemon=True)
        if self.overlaps:
            sampler.start()
        self._run(self._work)
        if self.overlaps:
            sampler.join()

    def _run(self, jobs: Jobs) -> None:
        """Run the jobs of a queue; while no job waits, run slices of sampling."""
        while not self._is_over:
            has_samples = jobs is self._samples and self.sampling.has_work
            try:
                jobs.get(timeout=0 if has_samples else None)()
            except queue.Empty:
                self.sampling.pump(SLICE_S)

    def stop(self) -> None:
        """End `run`; may be called from any thread or a signal handler."""
        self._is_over = True
        for jobs in (self._work, self._samples):
            jobs.put(lambda: None)  # wakes the thread


@contextmanager
def started(config: Any, aliases: Mapping[str, str] | None = None) -> Iterator[WorkQueue]:
    """Context with a `WorkQueue` for this configuration, whose groups have loaded their models."""
    with ExitStack() as at_end:
        at_end.enter_context(reproducible_arithmetic())
        config = with_threads(config)
        folder = Path(config.trainer.default_local_dir)
        folder.mkdir(parents=True, exist_ok=True)
        at_end.enter_context(FolderLock(folder))
        groups = at_end.enter_context(WorkerGroups(config, worker_code(config)))
        groups.note_placement()
        for role in groups:
            groups[role].init_model()
        yield WorkQueue(config, groups, aliases or {})
