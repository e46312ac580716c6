"""The program of a process that runs a reward function.

    python -m verl_like.process.child workers.rewards.process FD

`workers.rewards.scorer` starts it in a sandbox (`verl_like.process.pool`), and sends it samples.
The process answers as soon as a sample is scored. A function of a batch gets the samples of a
request in one call. Calls of coroutine functions run concurrently, others one by one. This module
imports nothing large, because the process restarts after every sample that hangs.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
from collections.abc import Awaitable, Callable, Collection
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from verl_like.errors import ConfigError
from verl_like.process.pool import UserEnd, describe_error
from verl_like.process.supervisor import supervise
from verl_like.registry import load_attribute
from workers.rewards.call import RewardCall
from workers.rewards.outcome import LATE, NO_REWARD, Sample, ScoreOutcome, place_of, read_outcome
from workers.rewards.scorer import BATCH_SHARES, FunctionSpec

MAX_SIDE_BY_SIDE = 64
"""Maximum number of concurrent calls of a coroutine function."""
Put = Callable[[int, ScoreOutcome], None]
"""A function that sends the outcome of the sample with this number."""


def main(control: Connection) -> None:
    """Serve the driver that started this process, until it closes the socket."""
    spec, folder, withheld = control.recv()
    supervise(
        control.fileno(), folder, spec.sandbox, lambda data: serve(UserEnd(data), spec, withheld)
    )


def serve(driver: UserEnd, spec: FunctionSpec, withheld: Collection[str] = ()) -> None:
    """Load the function, and score samples until the other end closes.

    `withheld` are names of environment variables that only the driver has, for error messages.
    """

    def load() -> tuple[RewardCall, Any]:
        function = load_attribute(spec.path, spec.name, spec.path_key, spec.name_key)
        try:
            call = RewardCall.of(function, spec.kwargs, spec.columns, spec.has_truth)
        except ConfigError as err:
            raise ConfigError(f"{spec.path_key}={spec.path}: {err}") from err
        return call, [call.is_async, call.takes_batches, call.reads]

    call = driver.load(str(spec), load, partial(describe_error, withheld=withheld))
    calls = Calls(call, spec, withheld)
    while True:
        try:
            samples = driver.receive()
        except EOFError:
            return
        calls.answer(samples, driver.send)


class Calls:
    """Calls one function; errors of the function become outcomes and are never raised."""

    def __init__(
        self, call: RewardCall, spec: FunctionSpec, withheld: Collection[str] = ()
    ) -> None:
        """Create the caller; for `withheld` see `serve`."""
        self._call, self._spec, self._withheld = call, spec, withheld

    def answer(self, samples: list[tuple[int, Sample]], put: Put) -> None:
        """Score samples, and call `put` for each as soon as its outcome is known."""
        if self._call.takes_batches:
            self._spec.sandbox.allow_cpu(BATCH_SHARES)
            outcomes = self.score_batch([sample for _, sample in samples])
            for (number, _), outcome in zip(samples, outcomes, strict=True):
                put(number, outcome)
        elif self._call.is_async:
            self._spec.sandbox.allow_cpu(BATCH_SHARES)
            asyncio.run(self._score_side_by_side(samples, put))
        else:
            for number, sample in samples:
                self._spec.sandbox.allow_cpu()
                put(number, self._outcome(lambda row: read_outcome(self._call(row)), sample))

    def score_batch(self, samples: list[Sample]) -> list[ScoreOutcome]:
        """Return the outcome of every sample, from one call of the function."""
        try:
            results: Any = self._call.whole_batch(samples)
            if inspect.isawaitable(results):
                results = asyncio.run(self._within_deadline(results))
            if not hasattr(results, "__len__"):
                words = f"the reward function scores a whole batch, but returned {results!r:.200}"
                raise ValueError(f"{words}{NO_REWARD}")
            if len(results) != len(samples):
                counts = f"{len(samples)} samples, but returned {len(results)} scores"
                raise ValueError(f"the reward function received {counts}")
        except TimeoutError:
            return [(None, {}, LATE)] * len(samples)
        except BaseException as err:  # noqa: BLE001 - a user's function may raise anything
            return [self._failed(err)] * len(samples)
        return [self._outcome(read_outcome, result) for result in results]

    def _outcome(self, read: Callable[[Any], ScoreOutcome], value: Any) -> ScoreOutcome:
        try:
            return read(value)
        except BaseException as err:  # noqa: BLE001 - a user's function may raise anything
            return self._failed(err)

    def _failed(self, err: BaseException) -> ScoreOutcome:
        return None, {}, describe_error(err, self._withheld) + place_of(err)

    async def _score_side_by_side(self, samples: list[tuple[int, Sample]], put: Put) -> None:
        """Score samples with an async function, `MAX_SIDE_BY_SIDE` at a time."""
        places = asyncio.Semaphore(MAX_SIDE_BY_SIDE)

        async def score(number: int, sample: Sample) -> None:
            async with places:
                try:
                    result = await self._within_deadline(self._call(sample))
                    outcome = self._outcome(read_outcome, result)
                except TimeoutError:
                    outcome = None, {}, LATE
                except BaseException as err:  # noqa: BLE001 - a user's function may raise anything
                    outcome = self._failed(err)
                put(number, outcome)

        loop, is_done = asyncio.get_running_loop(), threading.Event()
        watching = loop, is_done, self._spec.deadline, put
        threading.Thread(target=_end_when_blocked, args=watching, daemon=True).start()
        tasks = [loop.create_task(score(*pair), name=f"{pair[0]}") for pair in samples]
        await asyncio.gather(*tasks)
        is_done.set()

    async def _within_deadline(self, awaitable: Awaitable[Any]) -> Any:
        async with asyncio.timeout(self._spec.deadline):
            return await awaitable


def _end_when_blocked(
    loop: asyncio.AbstractEventLoop, is_done: threading.Event, deadline: float, put: Put
) -> None:
    """Report a coroutine that blocks all others past its deadline, and end the process.

    Only this process knows which coroutine it is. `put` sends that coroutine's outcome.
    """
    while not is_done.wait(deadline / 4):
        ticked = threading.Event()
        try:
            loop.call_soon_threadsafe(ticked.set)
        except RuntimeError:  # the loop is closed
            return
        if ticked.wait(deadline) or is_done.is_set():
            continue
        task = asyncio.current_task(loop)
        if task is not None and task.get_name().isdecimal():
            put(int(task.get_name()), (None, {}, LATE))
            os._exit(0)
