"""The exception tree. Every message says what, where, the numbers, and the way out.

VerlLikeError
├── BatchError (ValueError)            columns, lengths, rows of a DataProto
│   └── MissingColumnError (KeyError)  a column that is not there, with the nearest names
├── DispatchError (TypeError)          a call that a group cannot split or collect
├── ConfigError (ValueError)           a setting that cannot work
├── PlacementError (ValueError)        pools, roles and devices that do not fit together
│   └── NoRoomError                    the nodes that live have too little for a pool
├── WorkerError (RuntimeError)         something went wrong in or around a worker process
│   ├── WorkerDiedError                the process is gone
│   └── WaitTimeoutError (TimeoutError) a wait with a name passed its deadline
├── RewardError (RuntimeError)         a reward that may not fail has failed
├── CallbackError (RuntimeError)       a callback of the user's has raised
├── RolloutError (RuntimeError)        generation refused or broke
│   └── LostSamplesError               also a WorkerDiedError: the process had samples in the making
├── WeightSyncError (RuntimeError)     weights that are not provably the trainer's
├── LedgerError (RuntimeError)         a sample that was lost or counted twice
└── CheckpointError (RuntimeError)     a checkpoint that cannot be written, found or trusted
    └── DamagedCheckpointError         its files are not those that were written
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class VerlLikeError(Exception):
    """Root of everything this project raises on purpose."""


class BatchError(VerlLikeError, ValueError):
    """Columns, lengths or rows of a `DataProto` do not fit."""


class MissingColumnError(BatchError, KeyError):
    """A column was asked for that the batch does not have."""

    def __str__(self) -> str:
        """The plain message: `KeyError` would quote it."""
        return str(self.args[0]) if self.args else ""


class DispatchError(VerlLikeError, TypeError):
    """A call cannot be split over a group, or its results cannot be collected."""


class ConfigError(VerlLikeError, ValueError):
    """A setting, or a combination of settings, cannot work."""


class PlacementError(VerlLikeError, ValueError):
    """Pools, roles and devices do not fit together."""


class NoRoomError(PlacementError):
    """The nodes that live have too little for a pool: another node would do."""


class WorkerError(VerlLikeError, RuntimeError):
    """Something went wrong in or around a worker process."""


class WorkerDiedError(WorkerError):
    """A worker process is gone: its calls can never finish."""


class WaitTimeoutError(WorkerError, TimeoutError):
    """A wait passed its deadline; the message names who waited for whom."""


class RewardError(VerlLikeError, RuntimeError):
    """A reward that may not fail, by its `on_failure`, has failed."""


class CallbackError(VerlLikeError, RuntimeError):
    """A callback of the user's has raised; the cause is its own error."""


class RolloutError(VerlLikeError, RuntimeError):
    """Generation was refused or broke."""


class LostSamplesError(RolloutError, WorkerDiedError):
    """A worker process is gone with samples that it was making."""


class WeightSyncError(VerlLikeError, RuntimeError):
    """The weights of a rollout engine are not provably the trainer's."""


class LedgerError(VerlLikeError, RuntimeError):
    """The ledger of a detached run does not add up: a sample was lost, or counted twice."""


class CheckpointError(VerlLikeError, RuntimeError):
    """A checkpoint cannot be written, found or trusted."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint's files are not those that were written."""


def cannot_travel(why: object) -> str:
    """The message for a call whose arguments or result cannot be pickled or unpickled."""
    return f"arguments or result cannot travel between processes: {why}"


def few(words: Sequence[str], most: int = 8) -> str:
    """The first of them, and how many more there are: a message about a thousand stays readable."""
    more = len(words) - most
    return ", ".join(words[:most]) + (f" and {more} more" if more > 0 else "")


def nearest(name: str, valid: Iterable[str]) -> str:
    """A hint such as " Did you mean 'critic_pool'?", or the empty string when nothing is close.

    Capitals do not count.
    """
    by_lower_case = {str(v).lower(): str(v) for v in valid}
    close = difflib.get_close_matches(name.lower(), by_lower_case, n=3, cutoff=0.5)
    if not close:
        return ""
    return " Did you mean " + " or ".join(repr(by_lower_case[c]) for c in close) + "?"
