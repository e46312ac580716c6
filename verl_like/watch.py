"""Every wait has a name and a deadline. Past a warning age it says who waits for whom; past the deadline it shows the
workers' stacks.

Called by futures (`wait_for_calls`) and by the backends when they place and start processes (`Patience`).
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass

from verl_like.errors import WaitTimeoutError, WorkerDiedError
from verl_like.transport import Header, Pending, Transport

logger = logging.getLogger(__name__)
_COLLECTIVE = re.compile(
    r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<name>all_reduce|all_gather\w*|reduce_scatter\w*|'
    r"broadcast\w*|barrier|all_to_all\w*|reduce|gather\w*|scatter\w*|send\w*|recv\w*|monitored_barrier|init_process_group)$",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Deadlines:
    """How long each kind of wait may take, in seconds."""

    placement_s: float = 120.0
    start_s: float = 180.0
    rendezvous_s: float = 300.0
    call_s: float = 7200.0
    warn_s: float = 60.0
    grace_s: float = 8.0


class Patience:
    """The clock of one named wait: warns when it grows old (and again at twice that age), tells when it is over."""

    def __init__(self, what: str, limit_s: float, warn_s: float):
        """Starts to run at once."""
        self.what, self.limit_s, self.next_warning_s = what, limit_s, warn_s
        self.began = time.monotonic()

    @property
    def age_s(self) -> float:
        """Seconds since the wait began."""
        return time.monotonic() - self.began

    def remaining(self, slice_s: float = 1.0) -> float:
        """Seconds to wait before looking again; 0 when the deadline has passed."""
        return max(0.0, min(slice_s, self.limit_s - self.age_s, max(self.next_warning_s - self.age_s, 0.01)))

    def over(self) -> bool:
        """Whether the deadline has passed."""
        return self.age_s >= self.limit_s

    def warn_if_old(self, waiting_for: str) -> None:
        """Log who waits for whom, once per doubling of the age."""
        if self.age_s >= self.next_warning_s:
            logger.warning(
                "%s: waiting for %s since %.0f s (limit %.0f s)", self.what, waiting_for, self.age_s, self.limit_s
            )
            self.next_warning_s *= 2


def wait_for_calls(transport: Transport, name: str, pending: Sequence[Pending], timeout: float | None) -> list[Header]:
    """The headers of a group call, in rank order; raises the first failure as soon as it is certain.

    When one rank fails, the others get a grace period before the error is raised: they may be stuck in a collective
    that it left.
    """
    limits = transport.deadlines
    transport.report_abandoned()
    patience = Patience(name, limits.call_s if timeout is None else timeout, limits.warn_s)
    open_calls = {p.header: p for p in pending}
    headers: dict[int, Header] = {}
    failures: list[BaseException] = []
    failed_at = 0.0
    while open_calls:
        for reference in transport.wait(list(open_calls), patience.remaining()):
            call = open_calls.pop(reference)
            try:
                headers[call.rank] = header = transport.fetch(reference)
            except WorkerDiedError as died:
                failures.append(WorkerDiedError(f"{name}, {transport.describe(call.rank)}: {died}"))
            else:
                if header.error is not None:
                    failures.append(header.error.rebuild(f"{name}, {transport.describe(call.rank)}"))
            failed_at = failed_at or (patience.age_s if failures else 0.0)
        waiting_for = ", ".join(transport.describe(p.rank) for p in open_calls.values())
        if open_calls and failures and patience.age_s - failed_at >= limits.grace_s:
            failures[0].add_note(f"not finished {limits.grace_s:.0f} s after the failure: {waiting_for}")
            break
        if open_calls and patience.over() and not failures:
            raise WaitTimeoutError(_diagnosis(transport, patience, waiting_for, [p.rank for p in open_calls.values()]))
        if open_calls:
            patience.warn_if_old(waiting_for)
    transport.finished.extend(headers.values())
    if failures:
        raise _with_others(failures)
    return [headers[p.rank] for p in pending]


def _with_others(failures: list[BaseException]) -> BaseException:
    """The failure that explains most.

    A death before an exception; what other ranks raised becomes a note unless it is the same.
    """
    first = next((f for f in failures if isinstance(f, WorkerDiedError)), failures[0])
    for other in failures:
        if other is not first and (type(other), str(other)) != (type(first), str(first)):
            first.add_note(f"another rank raised {type(other).__name__}: {other}")
    return first


def _diagnosis(transport: Transport, patience: Patience, waiting_for: str, ranks: Sequence[int]) -> str:
    stacks = transport.stacks(5.0)
    lines = [
        f"{patience.what}: {waiting_for} did not finish within {patience.limit_s:.1f} s.",
        likely_cause(stacks, ranks),
    ]
    for rank in range(transport.world_size):
        lines.append(f"--- stack of {transport.describe(rank)}\n{stacks.get(rank, 'no answer')}")
    lines.append("If the work is only slow, raise the deadline for calls (watch.call_s).")
    return "\n".join(lines)


def likely_cause(stacks: dict[int, str], ranks: Sequence[int]) -> str:
    """One sentence on why ranks do not come back, read off their stacks."""
    where: dict[int, tuple[str, str]] = {}
    for rank, stack in stacks.items():
        found = list(_COLLECTIVE.finditer(stack))
        if found:
            where[rank] = found[-1]["name"], _caller_of(stack, found[0].start())
    silent = [rank for rank in ranks if rank not in stacks]
    if silent:
        names = ", ".join(map(str, silent))
        return f"Likely cause: rank {names} does not answer (its process is stopped, swapping, or in native code)."
    places = ", ".join(f"rank {rank} in {name} ({place})" for rank, (name, place) in sorted(where.items()))
    if len({name for name, _ in where.values()}) > 1 or len(set(where.values())) > 1:
        return f"Likely cause: the ranks are in different collectives and wait for each other: {places}."
    absent = [rank for rank in stacks if rank not in where]
    if where and absent:
        return f"Likely cause: {places} waits in a collective that rank {', '.join(map(str, absent))} never entered."
    if where:
        missing = "a rank outside this group, or the network, is missing"
        return f"Likely cause: all ranks are in the same collective ({places}): {missing}."
    return f"Likely cause: rank {', '.join(map(str, ranks))} is still computing (or sleeping); see its stack."


def _caller_of(stack: str, position: int) -> str:
    """The frame outside torch.distributed that entered the collective."""
    frames = re.findall(r'File "([^"]+)", line (\d+), in (\S+)', stack[:position])
    for file, line, name in reversed(frames):
        if "/torch/" not in file:
            return f"{name}, {file.rsplit('/', 1)[-1]}:{line}"
    return "torch.distributed"


def raise_start_errors(transport: Transport, headers: Sequence[Header]) -> None:
    """Raise the first constructor error once, whatever number of ranks met it."""
    failed = [h for h in headers if h.error is not None]
    if failed and failed[0].error is not None:
        error = failed[0].error.rebuild(f"the constructor on {transport.describe(failed[0].rank)}")
        if len(failed) > 1:
            error.add_note(f"{len(failed)} of {len(headers)} ranks failed in their constructors")
        raise error
