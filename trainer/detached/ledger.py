"""The ledger of a detached run: every sample is accounted for, by the uid of its prompt.

    made = trained + queued + dropped (by reason) + in flight

A sample is made from the moment that a maker begins it. One that was lost with its maker counts as
dropped there, and as made again where it is made again; what was kept of its group counts as made
by whoever makes the rest. Groups (a prompt's samples) stay together,
so a uid stands for all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl_like.errors import LedgerError

IN_FLIGHT, QUEUED, TAKEN = "in flight", "queued", "taken"
"""Where an open group is: being made, in the buffer, in the trainer's present step."""
LOST = "lost with its maker"
TOO_OLD = "kept of a lost maker, and too old since"
MADE_AGAIN = "made again after a resume"


@dataclass
class Account:
    """What one maker did, in samples."""

    made: int = 0
    trained: int = 0
    dropped: Counter[str] = field(default_factory=Counter)


@dataclass
class _Group:
    maker: int
    num_samples: int
    state: str


class Ledger:
    """Not thread-safe: `ExperienceBuffer` calls it under its lock."""

    def __init__(self) -> None:
        """Nothing is made yet."""
        self.makers: dict[int, Account] = {}
        self.trainers: Counter[int] = Counter()
        """Trainer rank -> samples that it trained on."""
        self.versions: Counter[int] = Counter()
        """Version of the weights -> trained samples that it made."""
        self.staleness: Counter[int] = Counter()
        """Versions between draw and update -> trained samples."""
        self._open: dict[str, _Group] = {}

    def begin(self, maker: int, uids: Iterable[str], samples_per_group: int) -> None:
        """A maker begins the samples of these prompts."""
        account = self.makers.setdefault(maker, Account())
        for uid in uids:
            if uid in self._open:
                raise LedgerError(
                    f"the samples of uid {uid} are {self._open[uid].state} already, and maker "
                    f"{maker} is to make them again: nothing is made twice."
                )
            self._open[uid] = _Group(maker, samples_per_group, IN_FLIGHT)
            account.made += samples_per_group

    def move(self, uids: Iterable[str], state: str) -> None:
        """These groups are elsewhere now: `QUEUED` or `TAKEN`."""
        for uid in uids:
            self._group(uid).state = state

    def trained(self, uid: str, ranks: Sequence[int], made_by: Sequence[int], version: int) -> None:
        """A group was trained on: the trainer rank of each sample, and the version that made it.

        `version` is that of the weights before the update.
        """
        group = self._close(uid)
        self.makers[group.maker].trained += group.num_samples
        self.trainers.update(ranks)
        self.versions.update(made_by)
        self.staleness.update(version - made for made in made_by)

    def drop(self, uids: Iterable[str], reason: str, kept: Iterable[str] = ()) -> None:
        """These groups are not trained on, but for samples that are `kept`, by their uids.

        Those are then of the maker that makes the rest of their group.
        """
        num_kept = Counter(kept)
        for uid in uids:
            group = self._close(uid)
            account = self.makers[group.maker]
            account.made -= num_kept[uid]
            account.dropped[reason] += group.num_samples - num_kept[uid]

    def drop_kept(self, maker: int, num_samples: int, reason: str) -> None:
        """Samples of a lost maker were kept, and are made again all the same."""
        account = self.makers[maker]
        account.made += num_samples
        account.dropped[reason] += num_samples

    def uids(self, state: str) -> list[str]:
        """The open groups in that state."""
        return [uid for uid, group in self._open.items() if group.state == state]

    def count(self, state: str, maker: int | None = None) -> int:
        """Samples in that state, of one maker or of all."""
        groups = (group for group in self._open.values() if group.state == state)
        return sum(group.num_samples for group in groups if maker in (None, group.maker))

    def check(self, found: Mapping[str, Iterable[str]] | None = None) -> None:
        """Raise if the ledger does not add up, for a maker or as a whole.

        `found` has the uids of the groups that are there in fact, by state.
        """
        for state, uids in (found or {}).items():
            if astray := set(uids) ^ set(self.uids(state)):
                raise LedgerError(
                    f"by the ledger other groups are {state} than there are: {sorted(astray)[:8]}."
                )
        for maker, account in self.makers.items():
            row = self._row(maker, account)
            accounted = row["trained"] + row["queued"] + sum(row["dropped"].values())
            if account.made != accounted + row["in_flight"]:
                raise LedgerError(f"maker {maker}: the ledger does not add up: {row}")
        trained = sum(account.trained for account in self.makers.values())
        if trained != sum(self.trainers.values()):
            raise LedgerError(
                f"makers gave {trained} samples that were trained on, trainers trained on "
                f"{dict(self.trainers)}."
            )

    def as_dict(self) -> dict[str, Any]:
        """All of it, as JSON has it; what a trainer's step has taken counts as queued."""
        return {
            "makers": {str(m): self._row(m, self.makers[m]) for m in sorted(self.makers)},
            "trainers": {str(rank): count for rank, count in sorted(self.trainers.items())},
            "staleness": {str(k): count for k, count in sorted(self.staleness.items())},
            "versions": {str(v): count for v, count in sorted(self.versions.items())},
        }

    def describe(self) -> str:
        """A table: a line a maker, and one for all."""
        rows = {f"maker {m}": self._row(m, self.makers[m]) for m in sorted(self.makers)}
        names = ("made", "trained", "queued", "dropped", "in_flight")
        lines = ["samples".ljust(10) + "".join(f"{name.replace('_', ' '):>11}" for name in names)]
        total: Counter[str] = Counter()
        reasons: Counter[str] = Counter()
        for who, row in rows.items():
            numbers = row | {"dropped": sum(row["dropped"].values())}
            total.update({name: numbers[name] for name in names})
            reasons.update(row["dropped"])
            lines.append(who.ljust(10) + "".join(f"{numbers[name]:>11}" for name in names))
        if len(rows) > 1:
            lines.append("all".ljust(10) + "".join(f"{total[name]:>11}" for name in names))
        for reason, count in reasons.items():
            lines.append(f"  dropped: {count} ({reason})")
        return "\n".join(lines)

    def load_state_dict(self, state: dict[str, Any], open_is: str) -> None:
        """Go on with this ledger; what was open then was not kept: dropped as `open_is`."""
        self.trainers = Counter({int(rank): n for rank, n in state["trainers"].items()})
        self.staleness = Counter({int(k): n for k, n in state["staleness"].items()})
        self.versions = Counter({int(v): n for v, n in state["versions"].items()})
        self._open = {}
        self.makers = {}
        for maker, row in state["makers"].items():
            dropped = Counter(row["dropped"])
            if left := row["queued"] + row["in_flight"]:
                dropped[open_is] += left
            self.makers[int(maker)] = Account(row["made"], row["trained"], dropped)

    def restore(
        self, maker: int, uids: Iterable[str], samples_per_group: int, counted_as: str
    ) -> None:
        """These groups of the ledger that was loaded were kept: they are queued still."""
        account = self.makers[maker]
        for uid in uids:
            account.dropped[counted_as] -= samples_per_group
            self._open[uid] = _Group(maker, samples_per_group, QUEUED)
        account.dropped += Counter()  # a reason without samples is none

    def _row(self, maker: int, account: Account) -> dict[str, Any]:
        return {
            "made": account.made,
            "trained": account.trained,
            "queued": self.count(QUEUED, maker) + self.count(TAKEN, maker),
            "dropped": dict(account.dropped),
            "in_flight": self.count(IN_FLIGHT, maker),
        }

    def _group(self, uid: str) -> _Group:
        if uid not in self._open:
            raise LedgerError(f"nobody made samples of uid {uid}, or they are done with already.")
        return self._open[uid]

    def _close(self, uid: str) -> _Group:
        group = self._group(uid)
        del self._open[uid]
        return group
