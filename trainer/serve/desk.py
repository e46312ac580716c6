"""The work of a server: what the door leaves here, the main thread does on the worker groups.

    requests ──> door (event loop's thread) ──> desk ──> this thread: actor      (training)
                                                    └──> rollout                 (samples)

The main thread does all that touches the actor, one request after the other. Samples run in its
pauses where rollout and actor share processes, and in a thread of their own where they do not: then
both overlap, as placement says.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from trainer.data.prompts import load_tokenizer
from trainer.groups.worker_groups import WorkerGroups
from trainer.launch import reproducible_arithmetic
from trainer.run_folder.folder import FolderLock
from trainer.serve.bodies import Facts
from trainer.serve.checkpoints import Checkpoints
from trainer.serve.promises import Promise
from trainer.serve.rows import Limits
from trainer.serve.sampling import SampleRequest, SamplingLoop
from trainer.serve.verbs import Verbs
from verl_like.errors import ConfigError
from workers.models.folder import generation_eos, model_folder
from workers.models.hf_config import read_hf_config

logger = logging.getLogger(__name__)
SLICE_S = 0.05
"""How long samples run before a training request may come in between."""
ADAPTERS_IN_MEMORY, MODELS_IN_MEMORY = 16, 2
"""Frozen snapshots of a model that stay in memory, of adapters and of whole models."""
ON_THIS_MACHINE = ("127.0.0.1", "localhost", "::1")
KEY_PREFIX = "tml-"


class Desk:
    """What the door knows of the models, and where it leaves work."""

    def __init__(self, config: Any, groups: Any, aliases: Mapping[str, str]) -> None:
        policy = config.actor_rollout_ref
        path: str = policy.model.path
        folder = model_folder(path, weights=False)
        tokenizer = load_tokenizer(path)
        vocabulary = read_hf_config(folder).get_text_config().vocab_size
        self.base_model = path
        self.names = {path, str(folder), folder.name}
        """The names by which clients may ask for the model."""
        self.aliases, self.notice = aliases, ""
        if aliases:
            self.notice = "; ".join(
                f"the loss {name} is computed as {other} by this server"
                for name, other in aliases.items()
            )
        self.trains_all = policy.model.lora_rank == 0
        self.most_snapshots = MODELS_IN_MEMORY if self.trains_all else ADAPTERS_IN_MEMORY
        self.limits = Limits(
            vocabulary, config.data.max_prompt_length, config.data.max_response_length
        )
        eos = tokenizer.eos_token_id
        own = [eos] if isinstance(eos, int) else []
        self.eos = tuple(dict.fromkeys([*own, *generation_eos(path)]))
        self.checkpoints = Checkpoints(Path(config.trainer.default_local_dir))
        self.verbs = Verbs(config, groups, self.checkpoints)
        pad = tokenizer.pad_token_id
        self.sampling = SamplingLoop(self.verbs, pad if pad is not None else self.eos[0])
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._sampled = threading.Event()
        self._is_over = False
        shares = self.verbs.rollout.shares_processes_with(self.verbs.actor)
        self.overlaps = not shares

    def work(self, promise: Promise, run: Callable[[], bytes | Facts]) -> None:
        """Let the main thread run this, and give its result to the promise."""

        def job() -> None:
            try:
                promise.resolve(run())
            except Exception as error:  # noqa: BLE001 - it goes to the client that asked
                logger.debug("a request failed", exc_info=True)
                promise.fail(error)

        self._work.put(job)

    def drop(self, states: Collection[str]) -> None:
        """Forget states, after the work that was asked for before."""

        def job() -> None:
            for state in states:
                self.verbs.drop(state)

        self._work.put(job)

    def sample(self, request: SampleRequest) -> None:
        """Let the rollout sample."""
        self.sampling.add(request)
        if self.overlaps:
            self._sampled.set()
        else:
            self._work.put(lambda: None)  # wakes the main thread

    def run(self) -> None:
        """Work until `stop`; the main thread's part."""
        sampler = threading.Thread(target=self._sample, name="sampling", daemon=True)
        if self.overlaps:
            sampler.start()
        while not self._is_over:
            has_samples = not self.overlaps and self.sampling.has_work
            try:
                self._work.get(timeout=0 if has_samples else None)()
            except queue.Empty:
                self.sampling.pump(SLICE_S)
        self._sampled.set()
        if self.overlaps:
            sampler.join()

    def _sample(self) -> None:
        while not self._is_over:
            if self.sampling.has_work:
                self.sampling.pump(SLICE_S)
            else:
                self._sampled.wait()
                self._sampled.clear()

    def stop(self) -> None:
        """End `run`; from any thread or a signal's handler."""
        self._is_over = True
        self._work.put(lambda: None)


def check_key(host: str, token: str) -> None:
    """Reject an open door without a key, and a key that the SDK would not send."""
    if token and not token.startswith(KEY_PREFIX):
        raise ConfigError(f"--token must begin with {KEY_PREFIX!r}: the SDK sends no other keys.")
    if host not in ON_THIS_MACHINE and not token:
        raise ConfigError(
            f"--host={host} is open to other machines: give a key by --token={KEY_PREFIX}SECRET, "
            "which clients set as TINKER_API_KEY. Put a proxy with TLS before the server."
        )


@contextmanager
def started(config: Any, aliases: Mapping[str, str] | None = None) -> Iterator[Desk]:
    """Within, the groups of a configuration run with their models."""
    with ExitStack() as at_end:
        at_end.enter_context(reproducible_arithmetic())
        folder = Path(config.trainer.default_local_dir)
        folder.mkdir(parents=True, exist_ok=True)
        at_end.enter_context(FolderLock(folder))
        policy = config.actor_rollout_ref
        code = [*config.role_workers.values(), policy.rollout.name, policy.actor.optim.optimizer]
        groups = at_end.enter_context(WorkerGroups(config, code))
        groups.note_placement()
        groups["actor"].init_model(0)
        groups["rollout"].init_model()
        yield Desk(config, groups, aliases or {})
