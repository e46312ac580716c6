"""The log of a run's samples: every sample is trained on, dropped for a reason, or still open.

    made = trained + dropped (by reason) + open

A sample is identified by the uid of its prompt and its index among the prompt's samples. The log
counts the tokens of a sample twice, independently: when the sample comes from the rollout, and in
the batch that critic and actor train on. Between the two, every filter reports the remaining
samples (`on_filter`). If the counts differ, the run ends with a `SampleLogError`, unless user code
may have changed the batch.

This log also provides the token metrics of a step and the summary of an asynchronous run.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

from trainer.run_folder.metrics import LEFT_OUT, SAMPLED, TRAINED
from verl_like.batch.protocol import DataProto
from verl_like.errors import SampleLogError
from workers.columns import count_ones

P = ParamSpec("P")
Result = TypeVar("Result")
SampleKey = tuple[str, int]
"""(uid of the prompt, index of the sample)."""
IN_FLIGHT, QUEUED, TAKEN = "in flight", "queued", "taken"
"""States of an open sample: in generation, in a buffer, or in the trainer's current step."""
EMPTY = "no token"
USER_CODE = "by code of the run's own"
REGENERATED = "repeated after a resume"
STEP_AGAIN = "step repeated"
HOUSE = {"trainer", "abc", "typing", "builtins"}
"""Packages of classes that are not user code."""
MAX_NAMED = 8
"""Maximum number of samples that an error names."""


@dataclass
class Account:
    """Counts the samples of one generator or, in a synchronous run, of one step."""

    generated: int = 0
    trained: int = 0
    dropped: Counter[str] = field(default_factory=Counter)


@dataclass
class _Open:
    """A sample that is not yet accounted for."""

    account: int
    state: str = IN_FLIGHT
    tokens: int = 0
    """Tokens that may still be trained on."""


def _locked(method: Callable[P, Result]) -> Callable[P, Result]:
    """Let one thread at a time call the methods of a log."""

    @functools.wraps(method)
    def call(*arguments: P.args, **settings: P.kwargs) -> Result:
        log: Any = arguments[0]
        with log._lock:
            return method(*arguments, **settings)

    return call


class SampleLog:
    """The state of every sample. Several threads can use it; it never waits for a queue."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.accounts: dict[int, Account] = defaultdict(Account)
        self.counts: dict[str, Counter[int]] = defaultdict(Counter)
        """Maps a property of trained samples, such as the rank, to (value -> number of samples)."""
        self.sampled_tokens = self.trained_tokens = 0
        self.left_out: Counter[str] = Counter()
        """Maps a reason to the number of sampled tokens that are not trained on."""
        self._open: dict[SampleKey, _Open] = {}

    @_locked
    def begin(self, account: int, samples: Iterable[SampleKey]) -> None:
        """Record under this account that these samples are being generated."""
        for sample in samples:
            if sample in self._open:
                raise SampleLogError(
                    f"sample {_name(sample)} is already {self._open[sample].state}, but is "
                    f"generated again (by generator {account}, or in step {account})."
                )
            self._open[sample] = _Open(account)
            self.accounts[account].generated += 1

    @_locked
    def receive(self, tokens: Mapping[SampleKey, int], given_up: Mapping[str, int]) -> None:
        """Record the token count of each finished sample, and the `given_up` counts by reason."""
        for sample, num in tokens.items():
            self._open[sample].tokens = num
            self._open[sample].state = QUEUED
        self.sampled_tokens += sum(tokens.values()) + sum(given_up.values())
        self.leave_out(given_up)

    @_locked
    def mark_taken(self, samples: Iterable[SampleKey]) -> None:
        """Record that the trainer's current step has these samples."""
        for sample in samples:
            self._open[sample].state = TAKEN

    @_locked
    def reduce_tokens(
        self, reason: str, tokens: Mapping[SampleKey, int], among: Iterable[SampleKey]
    ) -> tuple[int, list[SampleKey]]:
        """Reduce the samples `among` to these token counts.

        A sample with no remaining tokens is dropped, for the reason `EMPTY` if it had none before.
        Return the number of tokens that were left out, and the samples that have tokens.
        """
        num_left_out, remaining = 0, []
        for sample in among:
            entry, num = self._open[sample], tokens.get(sample, 0)
            if num > entry.tokens:
                raise SampleLogError(
                    f"sample {_name(sample)} has {num} tokens after {reason}, and had "
                    f"{entry.tokens} before."
                )
            self.leave_out({reason: entry.tokens - num})
            num_left_out += entry.tokens - num
            if num:
                entry.tokens = num
                remaining.append(sample)
            else:
                self._close(sample).dropped[reason if entry.tokens else EMPTY] += 1
        return num_left_out, remaining

    @_locked
    def train(
        self,
        tokens: Mapping[SampleKey, int],
        stats: Mapping[SampleKey, Mapping[str, int]] | None = None,
    ) -> None:
        """Close these samples as trained on; `tokens` has each one's token count in the update.

        `stats` has properties of samples, which are counted. Raise if the log has other token
        counts.
        """
        stats = stats or {}
        differ = [
            f"{_name(sample)} ({num} instead of {self._tokens(sample)})"
            for sample, num in tokens.items()
            if num != self._tokens(sample)
        ]
        if differ:
            raise SampleLogError(
                "the token counts of these samples in the update differ from the sample log "
                f"({len(differ)} in all): {', '.join(differ[:MAX_NAMED])}."
            )
        for sample, num in tokens.items():
            self._close(sample).trained += 1
            self.trained_tokens += num
            for name, value in stats.get(sample, {}).items():
                self.counts[name][value] += 1

    @_locked
    def drop(self, samples: Iterable[SampleKey], reason: str) -> None:
        """Close these samples as dropped."""
        for sample in samples:
            self.leave_out({reason: self._tokens(sample)})
            self._close(sample).dropped[reason] += 1

    @_locked
    def leave_out(self, tokens: Mapping[str, int]) -> None:
        """Record the number of sampled tokens that are not trained on, by reason."""
        self.left_out.update(tokens)
        self.left_out += Counter()  # removes reasons with 0 tokens

    @_locked
    def drop_after(self, account: int, reason: str) -> None:
        """Count the samples of the accounts (steps) after `account` as dropped."""
        for number in [number for number in self.accounts if number > account]:
            late = self.accounts[number]
            self.drop([s for s, entry in self._open.items() if entry.account == number], reason)
            late.trained, late.dropped = 0, Counter({reason: late.generated})

    @_locked
    def open(self, state: str) -> list[SampleKey]:
        """Return the open samples in that state."""
        return [sample for sample, entry in self._open.items() if entry.state == state]

    @_locked
    def tokens(self, samples: Iterable[SampleKey]) -> dict[SampleKey, int]:
        """Return the number of remaining tokens of each of these open samples."""
        return {sample: self._tokens(sample) for sample in samples}

    @_locked
    def check(self, there: Mapping[str, Iterable[str]] | None = None) -> None:
        """Raise if samples or tokens do not add up, or if `there` has other open uids."""
        for state, uids in (there or {}).items():
            astray = set(uids) ^ {uid for uid, _ in self.open(state)}
            if astray:
                raise SampleLogError(
                    f"the sample log and the run disagree about which groups are {state}: "
                    f"{sorted(astray)[:MAX_NAMED]}."
                )
        for generator, row in self.rows().items():
            accounted = row["trained"] + row["queued"] + sum(row["dropped"].values())
            if row["made"] != accounted + row["in_flight"]:
                raise SampleLogError(
                    f"the samples of generator or step {generator} do not add up: {row}"
                )
        tokens = self.token_counts()
        parts = tokens["trained"] + tokens["queued"] + sum(tokens["left_out"].values())
        if tokens["sampled"] != parts:
            raise SampleLogError(f"the tokens of the run do not add up: {tokens}")

    @_locked
    def token_counts(self) -> dict[str, Any]:
        """Return the number of sampled tokens, in total and by state."""
        return {
            "sampled": self.sampled_tokens,
            "trained": self.trained_tokens,
            "queued": sum(entry.tokens for entry in self._open.values()),
            "left_out": dict(self.left_out),
        }

    @_locked
    def rows(self) -> dict[str, dict[str, Any]]:
        """Map each account to its number of samples by state; taken samples count as queued."""
        places = Counter((entry.account, entry.state) for entry in self._open.values())
        return {
            str(number): {
                "made": account.generated,
                "trained": account.trained,
                "queued": places[number, QUEUED] + places[number, TAKEN],
                "dropped": dict(account.dropped),
                "in_flight": places[number, IN_FLIGHT],
            }
            for number, account in sorted(self.accounts.items())
        }

    @_locked
    def state_dict(self) -> dict[str, Any]:
        """Return the whole log, ready for JSON."""
        return {"generators": self.rows(), "tokens": self.token_counts()} | {
            name: {str(value): count for value, count in sorted(counts.items())}
            for name, counts in self.counts.items()
        }

    @_locked
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the log. Open samples count as dropped, except those that `restore` adds."""
        self.accounts.clear()
        self._open.clear()
        for name in state.keys() - {"generators", "tokens"}:
            self.counts[name] = Counter({int(value): n for value, n in state[name].items()})
        tokens = state["tokens"]
        self.trained_tokens, self.left_out = tokens["trained"], Counter(tokens["left_out"])
        self.leave_out({REGENERATED: tokens["queued"]})
        older = tokens["trained"] + tokens["queued"] + sum(tokens["left_out"].values())
        self.sampled_tokens = tokens.get("sampled", tokens.get("drawn", older))
        for number, row in state["generators"].items():
            dropped = Counter(row["dropped"])
            dropped[REGENERATED] += row["queued"] + row["in_flight"]
            self.accounts[int(number)] = Account(row["made"], row["trained"], +dropped)

    @_locked
    def restore(self, account: int, tokens: Mapping[SampleKey, int]) -> None:
        """Mark these samples of the loaded log as still queued, with their token counts."""
        owner = self.accounts[account]
        owner.dropped[REGENERATED] -= len(tokens)
        owner.dropped += Counter()
        self.leave_out({REGENERATED: -sum(tokens.values())})
        self._open |= {sample: _Open(account, QUEUED, num) for sample, num in tokens.items()}

    def _tokens(self, sample: SampleKey) -> int:
        if sample not in self._open:
            raise SampleLogError(
                f"sample {_name(sample)} is not open: it was not generated, or is closed already."
            )
        return self._open[sample].tokens

    def _close(self, sample: SampleKey) -> Account:
        self._tokens(sample)
        return self.accounts[self._open.pop(sample).account]


class SampleWatch:
    """The observer that keeps the sample log."""

    def __init__(self) -> None:
        self.log = SampleLog()
        self._generators_log: SampleLog | None = None
        """The log of an asynchronous run, to which its generators add new samples."""
        self._sampled = self._trained = 0
        """Number of tokens that came from the rollout in this step, and that its update got."""
        self._left_out: Counter[str] = Counter()
        self._has_updated = False
        self._samples: dict[SampleKey, None] = {}
        """The samples of this step that are open."""

    def on_init_end(self, trainer: Any) -> None:
        """Begin an attempt: count samples of steps that it repeats as dropped."""
        self._generators_log = None if trainer.origins is None else trainer.origins.log
        self.log = self._generators_log or self.log
        if self._generators_log is None:
            self.log.drop_after(trainer.global_step, STEP_AGAIN)
        self._clear()

    def on_generated(self, trainer: Any, batch: DataProto) -> None:
        """Record the samples that come from the rollout."""
        tokens, given_up = tokens_by_sample(batch), tokens_given_up(batch)
        if self._generators_log is None:
            self.log.begin(trainer.global_step, tokens)
            self.log.receive(tokens, given_up)
            self.log.mark_taken(tokens)
        self._samples |= dict.fromkeys(tokens)
        self._sampled += sum(tokens.values()) + sum(given_up.values())
        self._left_out.update(given_up)

    def on_stage_begin(self, trainer: Any, stage: str, batch: DataProto | None) -> None:
        """Check that the update gets all sampled tokens except those that filters left out."""
        if stage != "update" or batch is None or not self._samples:
            return
        self._has_updated = True
        tokens = tokens_by_sample(batch)
        num_rows = len(batch)
        known = self.log.tokens(self._samples)
        if has_user_code(trainer):
            self._reduce_tokens(
                USER_CODE, {s: min(tokens.get(s, 0), num) for s, num in known.items()}
            )
        elif tokens != known or len(tokens) != num_rows:
            wrong = [s for s in known | tokens if known.get(s) != tokens.get(s)]
            problem = "a sample occurs twice"
            if wrong:
                problem = (
                    f"of sample {_name(wrong[0])}, the rollout sampled "
                    f"{known.get(wrong[0], 'none')}, the update gets "
                    f"{tokens.get(wrong[0], 'none')}"
                )
            raise SampleLogError(
                f"tokens of step {trainer.global_step} do not add up: {problem}. The update "
                f"gets {num_rows} rows of {len(known)} samples; filters removed "
                f"{dict(self._left_out)}. This is a bug in verl-like: report it with the log."
            )
        self._reduce_tokens(EMPTY, tokens)

    def on_filter(self, trainer: Any, name: str, before: DataProto, after: DataProto) -> None:
        """Record the samples that a filter has left out."""
        if self._samples:
            self._reduce_tokens(name, tokens_by_sample(after))

    def on_update(self, trainer: Any, batch: DataProto) -> None:
        """Count the tokens of the update call; a row that occurs twice counts once."""
        if not self._samples:
            return
        self._has_updated = True
        stats = None if self._generators_log is None else trainer.origins.sample_stats(batch)
        tokens = tokens_by_sample(batch)
        if has_user_code(trainer):
            known = self.log.tokens(self._samples)
            tokens = {s: min(tokens.get(s, 0), num) for s, num in known.items()}
            self._reduce_tokens(USER_CODE, tokens)
        missing = [sample for sample in self._samples if sample not in tokens]
        if missing:
            raise SampleLogError(
                f"the update of step {trainer.global_step} did not get the samples "
                f"{', '.join(map(_name, missing[:MAX_NAMED]))} (uid/index), and no filter dropped "
                "them."
            )
        ours = {sample: num for sample, num in tokens.items() if sample in self._samples}
        self.log.train(ours, stats)
        self._trained += sum(ours.values())
        self._samples = {}

    def on_step_end(self, trainer: Any, metrics: dict[str, float]) -> None:
        """Close every sample of the step, and add its tokens to the metrics."""
        if self._samples:  # a user's update did not call the hook
            self._reduce_tokens(USER_CODE, {})
        if self._sampled and self._has_updated:
            if self._sampled != self._trained + self._left_out.total():
                raise SampleLogError(
                    f"tokens of step {trainer.global_step} do not add up: {self._sampled} were "
                    f"sampled, {self._trained} trained on, {dict(self._left_out)} left out."
                )
            metrics |= {SAMPLED: float(self._sampled), TRAINED: float(self._trained)}
            metrics |= {LEFT_OUT + reason: float(n) for reason, n in self._left_out.items() if n}
        self._clear()

    def _reduce_tokens(self, reason: str, tokens: dict[SampleKey, int]) -> None:
        num_left_out, remaining = self.log.reduce_tokens(reason, tokens, self._samples)
        self._left_out[reason] += num_left_out
        self._samples = dict.fromkeys(remaining)

    def _clear(self) -> None:
        self._sampled = self._trained = 0
        self._has_updated, self._left_out, self._samples = False, Counter(), {}


def has_user_code(trainer: Any) -> bool:
    """Return whether a user's hooks or stages may have changed a batch."""
    packages = {cls.__module__.partition(".")[0] for cls in type(trainer).__mro__}
    return bool(trainer.run.callbacks) or not packages <= HOUSE


def tokens_by_sample(batch: DataProto) -> dict[SampleKey, int]:
    """Return each sample's number of tokens in the losses; {} if rows lack uid or sample index."""
    uids = batch.non_tensor_batch.get("uid")
    if uids is None or "sample_index" not in batch.columns:
        return {}
    indices = batch.padded("sample_index").tolist()
    counts = count_ones(batch, "response_mask").tolist()
    return {(str(uid), index): num for uid, index, num in zip(uids, indices, counts, strict=True)}


def tokens_given_up(batch: DataProto | None) -> Counter[str]:
    """Return the number of tokens that trajectories discarded at a restart, by reason."""
    counts = Counter[str]()
    if batch is not None:
        for info in batch.non_tensor_batch.get("trajectory", ()):
            counts.update(info.get("given_up_tokens", {}))  # padding rows have none
    return counts


def _name(sample: SampleKey) -> str:
    return f"{sample[0]}/{sample[1]}"
