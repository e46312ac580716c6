"""The exception tree. Messages say what happened, where, and what to do.

VerlLikeError
├── BatchError (ValueError)            columns, lengths, rows of a DataProto
│   └── MissingColumnError (KeyError)  a column that does not exist, with the nearest names
├── DispatchError (TypeError)          a call that a group cannot split or collect
├── ConfigError (ValueError)           a setting that cannot work
├── PlacementError (ValueError)        pools, roles and devices that do not fit together
│   └── InsufficientResourcesError     the available nodes lack resources for a pool
├── WorkerError (RuntimeError)         something went wrong in or around a worker process
│   ├── WorkerDiedError                the process is gone, or was stopped
│   └── WaitTimeoutError (TimeoutError)  a wait passed its deadline
├── RewardError (RuntimeError)         a reward failed too often, or a score is NaN or infinite
├── CallbackError (RuntimeError)       a user's callback raised an exception
├── RolloutError (RuntimeError)        generation was rejected or failed
│   └── LostSamplesError               also a WorkerDiedError: samples were unfinished
├── WeightSyncError (RuntimeError)     weights that are not provably the trainer's
├── SampleLogError (RuntimeError)      a sample that was lost or counted twice
└── CheckpointError (RuntimeError)     a checkpoint that cannot be written, read or trusted
    └── DamagedCheckpointError         its files differ from those that were written
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class VerlLikeError(Exception):
    """Base class of this project's errors: catch it to handle all of them.

    Example:

        try:
            run(config)
        except VerlLikeError as error:
            print(error)
    """


class BatchError(VerlLikeError, ValueError):
    """Columns, lengths or rows of a `DataProto` do not fit."""


class MissingColumnError(BatchError, KeyError):
    """The batch does not have the requested column."""

    def __str__(self) -> str:
        """Return the plain message, which `KeyError` would quote."""
        return str(self.args[0]) if self.args else ""


class DispatchError(VerlLikeError, TypeError):
    """A call cannot be split over a group, or its results cannot be collected."""


class ConfigError(VerlLikeError, ValueError):
    """A setting, or a combination of settings, cannot work.

    Example:

        try:
            load_config(["data.tran_batch_size=64"])
        except ConfigError as error:
            print(error)                            # ... Did you mean 'data.train_batch_size'?
    """


class PlacementError(VerlLikeError, ValueError):
    """Pools, roles and devices do not fit together."""


class InsufficientResourcesError(PlacementError):
    """The available nodes lack resources for a pool; more or larger nodes would help."""


class WorkerError(VerlLikeError, RuntimeError):
    """Something went wrong in or around a worker process."""


class WorkerDiedError(WorkerError):
    """A worker process is gone or stopped, so its calls cannot finish."""


class WaitTimeoutError(WorkerError, TimeoutError):
    """A wait passed its deadline; for a call, the message has the likely cause and the stacks."""


class RewardError(VerlLikeError, RuntimeError):
    """A reward failed more often than its settings allow, or a score is NaN or infinite."""


class CallbackError(VerlLikeError, RuntimeError):
    """A user's callback raised an exception, which is the cause of this error."""


class RolloutError(VerlLikeError, RuntimeError):
    """Generation was rejected or failed."""


class LostSamplesError(RolloutError, WorkerDiedError):
    """A worker process is gone with unfinished samples."""


class WeightSyncError(VerlLikeError, RuntimeError):
    """The weights of a rollout engine are not provably the trainer's."""


class SampleLogError(VerlLikeError, RuntimeError):
    """The sample log does not add up: a sample was lost, or counted twice."""


class CheckpointError(VerlLikeError, RuntimeError):
    """A checkpoint cannot be written, read or trusted."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint's files differ from those that were written."""


def pickling_message(why: object) -> str:
    """Return the message for a call whose arguments or result cannot be pickled or unpickled."""
    return f"arguments or result cannot be pickled for another process: {why}"


def join_few(words: Sequence[str], limit: int = 8) -> str:
    """Return the first `most` names and the number of the others, to keep messages short."""
    listed = ", ".join(words[:limit])
    return listed if len(words) <= limit else f"{listed} and {len(words) - limit} more"


def nearest_divisors(size: int, total: int) -> str:
    """Return the divisors of `total` next below and above `size`, such as "2 or 4"."""
    divisors = [number for number in range(1, total + 1) if total % number == 0]
    below = [number for number in divisors if number < size][-1:]
    above = [number for number in divisors if number > size][:1]
    return " or ".join(map(str, below + above))


def nearest(name: str, valid: Iterable[str]) -> str:
    """Return a hint such as " Did you mean 'critic_pool'?", or "" if no name is close.

    Case is ignored. A name that ends in `_` and `name` comes first, then one with swapped letters.
    """
    by_lower_case = {str(v).lower(): str(v) for v in valid}
    close = difflib.get_close_matches(name.lower(), by_lower_case, n=3)
    if close:  # only names that are about as close as the closest
        best = difflib.SequenceMatcher(None, close[0], name.lower()).ratio()
        close = difflib.get_close_matches(name.lower(), close, n=3, cutoff=best - 0.1)
        close.sort(key=lambda other: sorted(other) != sorted(name.lower()))
    ends = [v for v in by_lower_case if name and v.endswith(f"_{name.lower()}")]
    return did_you_mean([by_lower_case[c] for c in dict.fromkeys([*ends, *close][:3])])


def did_you_mean(names: Sequence[str]) -> str:
    """Return a hint that suggests these names, or "" if there are none."""
    return f" Did you mean {' or '.join(map(repr, names))}?" if names else ""
