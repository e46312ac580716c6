"""The program of a process that runs a reward function.

`python -m workers.rewards.process FD SPEC`; `workers.rewards.scorer` starts it.

Reads lists of (number, sample) from the pipe at file descriptor FD and answers each sample at once,
so that the driver knows which one hangs. SPEC is a `FunctionSpec` as JSON. Coroutine functions run
side by side, others one by one. Imports nothing heavy: it starts again after every sample that
hangs.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from numbers import Real
from typing import Any

from verl_like.errors import ConfigError
from verl_like.registry import load_from
from workers.rewards.call import Call, Sample

Steps = list[tuple[int, float]]
"""(token of the response, score) of every step."""
Outcome = tuple[float | None, dict[str, Any], str | None]
"""Score (None: failed), the other numbers of the function, `pred` and steps, what went wrong."""
STEPS = "step_scores"
"""The one list that is kept: scores of the response's steps, at the tokens where they end."""
VOTE = "pred"
"""The one text that is kept: a sample's answer, for the majority of a prompt's samples."""
LATE = "passed its deadline"
MAX_SIDE_BY_SIDE = 64
"""Calls of a coroutine function that run at the same time."""


@dataclass(frozen=True)
class FunctionSpec:
    """Which function, and how it is called."""

    path: str = "workers.rewards.functions"
    name: str = "default_compute_score"
    kwargs: dict[str, Any] = field(default_factory=dict)
    deadline: float = 10.0
    columns: Sequence[str] = ()
    """What the rows of the data have besides."""

    def __str__(self) -> str:
        return f"{self.path}:{self.name}"

    def to_json(self) -> str:
        """For the command line."""
        return json.dumps(asdict(self))


def read_outcome(result: Any) -> Outcome:
    """What the function returned: a finite number, or a dict with one; all else is refused.

    Beside scores of steps there need be none.
    """
    extras = dict(result) if isinstance(result, dict) else {"score": result}
    steps = read_steps(extras.pop(STEPS, None))
    score = extras.pop("score", 0.0 if steps else None)
    if isinstance(score, str) or score is None or not math.isfinite(float(score)):
        raise ValueError(
            f"the reward function returned {result!r}; a finite number, or a dict with one as "
            "'score'"
        )

    kept: dict[str, Any] = {}
    for name, value in extras.items():
        if isinstance(value, Real):
            kept[str(name)] = float(value)
    if VOTE in extras:
        kept[VOTE] = str(extras[VOTE])
    if steps:
        kept[STEPS] = steps
    return float(score), kept, None


def read_steps(steps: Any) -> Steps:
    """[token, score] pairs, checked: tokens count from 0 in the response, scores are finite."""
    pairs = [(int(token), float(score)) for token, score in steps or []]
    for token, score in pairs:
        if token < 0 or not math.isfinite(score):
            raise ValueError(
                f"{STEPS} has [{token}, {score}]; pairs of a token's number, from 0, and a finite "
                "score"
            )
    return pairs


def score_sample(call: Call, sample: Sample) -> Outcome:
    """One sample's outcome; never raises."""
    try:
        return read_outcome(call(sample))
    except Exception as err:  # noqa: BLE001 - a user's function may raise anything
        return None, {}, f"{type(err).__name__}: {err}"


def score_batch(call: Call, samples: list[Sample], deadline: float) -> list[Outcome]:
    """Every sample's outcome, of a function that takes them all at once; never raises."""
    try:
        results = call.whole_batch(samples)
        if inspect.isawaitable(results):
            results = asyncio.run(_within(results, deadline))
        if len(results) != len(samples):
            raise ValueError(f"it got {len(samples)} samples and returned {len(results)} scores")
    except TimeoutError:
        return [(None, {}, LATE)] * len(samples)
    except Exception as err:  # noqa: BLE001 - a user's function may raise anything
        return [(None, {}, f"{type(err).__name__}: {err}")] * len(samples)
    return [_outcome_of(result) for result in results]


def _outcome_of(result: Any) -> Outcome:
    try:
        return read_outcome(result)
    except (TypeError, ValueError) as err:
        return None, {}, f"{type(err).__name__}: {err}"


async def _within(awaitable: Any, deadline: float) -> Any:
    return await asyncio.wait_for(awaitable, deadline)


async def await_outcome(call: Call, sample: Sample, deadline: float) -> Outcome:
    """One sample's outcome, of a coroutine function; never raises."""
    try:
        return read_outcome(await asyncio.wait_for(call(sample), deadline))
    except TimeoutError:
        return None, {}, LATE
    except Exception as err:  # noqa: BLE001 - a user's function may raise anything
        return None, {}, f"{type(err).__name__}: {err}"


async def score_side_by_side(
    call: Call, deadline: float, samples: list[tuple[int, Sample]], pipe: Connection
) -> None:
    """Every sample's outcome, sent as it comes."""
    places = asyncio.Semaphore(MAX_SIDE_BY_SIDE)

    async def score(number: int, sample: Sample) -> None:
        async with places:
            outcome = await await_outcome(call, sample, deadline)
        pipe.send((number, outcome))

    await asyncio.gather(*(score(number, sample) for number, sample in samples))


def serve(pipe: Connection, spec: FunctionSpec) -> None:
    """Answer until the other end closes."""
    try:
        function = load_from(spec.path, spec.name, "custom_reward_function")
        call = Call.of(function, spec.kwargs, spec.columns)
    except ConfigError as err:
        pipe.send((str(err), False, False))
        return
    pipe.send((None, call.runs_side_by_side, call.takes_batches))
    while True:
        try:
            samples = pipe.recv()
        except EOFError:
            return
        answer(pipe, call, samples, spec.deadline)


def answer(
    pipe: Connection, call: Call, samples: list[tuple[int, Sample]], deadline: float
) -> None:
    """Send the outcome of every sample, each as soon as it is known."""
    if call.takes_batches:
        outcomes = score_batch(call, [sample for _, sample in samples], deadline)
        for (number, _), outcome in zip(samples, outcomes, strict=True):
            pipe.send((number, outcome))
    elif call.runs_side_by_side:
        asyncio.run(score_side_by_side(call, deadline, samples, pipe))
    else:
        for number, sample in samples:
            pipe.send((number, score_sample(call, sample)))


def main(pipe: Connection, spec: str) -> None:
    """Serve the driver that started this process; `spec` is a `FunctionSpec` as JSON."""
    serve(pipe, FunctionSpec(**json.loads(spec)))
