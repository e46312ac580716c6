"""The ledger of a detached run: every sample is accounted for, by the uid of its prompt.

    made = trained + queued + dropped (by reason) + in flight

and so is every token that has come with its sample:

    drawn = trained + queued + left out (by reason)

A sample is made from the moment that a maker begins it. One that was lost with its maker counts as
dropped there, and as made again where it is made again. Groups (a prompt's samples) stay together,
so a uid stands for all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainer.report.detached import ledger_table
from trainer.report.tokens import tokens_in_words
from verl_like.errors import LedgerError
from verl_like.terminal import draw_table

IN_FLIGHT, QUEUED, TAKEN = "in flight", "queued", "taken"
"""Where an open group is: being made, in the buffer, in the trainer's present step."""
LOST = "lost with its maker"
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
    num_tokens: int = 0


class Ledger:
    """Not thread-safe: `ExperienceBuffer` calls it under its lock."""

    def __init__(self) -> None:
        self.makers: dict[int, Account] = {}
        self.trainers: Counter[int] = Counter()
        """Trainer rank -> samples that it trained on."""
        self.versions: Counter[int] = Counter()
        """Version of the weights -> trained samples that it made."""
        self.staleness: Counter[int] = Counter()
        """Versions between draw and update -> trained samples."""
        self.trained_tokens = self._tokens_in_step = 0
        self.left_out: Counter[str] = Counter()
        """Reason -> tokens that were drawn and not trained on."""
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
            self._open[uid].state = state

    def queue(self, tokens: Mapping[str, int], given_up: Mapping[str, int]) -> None:
        """These groups have come, with so many tokens each, and more `given_up` by reason."""
        self.move(tokens, QUEUED)
        for uid, num in tokens.items():
            self._open[uid].num_tokens = num
        self.leave_out(given_up)

    def trained(self, uid: str, ranks: Sequence[int], made_by: Sequence[int], version: int) -> None:
        """A group was trained on: the trainer rank of each sample, and the version that made it.

        `version` is that of the weights before the update.
        """
        group = self._close(uid)
        self.makers[group.maker].trained += group.num_samples
        self.trainers.update(ranks)
        self.versions.update(made_by)
        self._tokens_in_step += group.num_tokens
        self.staleness.update(version - made for made in made_by)

    def tokens_trained(self, num: int, left_out: Mapping[str, int]) -> None:
        """Of the groups that were trained on so many tokens were, and others not, by reason."""
        if self._tokens_in_step != num + sum(left_out.values()):
            raise LedgerError(
                f"the groups of this step have {self._tokens_in_step} tokens, and {num} were "
                f"trained on, {dict(left_out)} were not."
            )
        self.trained_tokens += num
        self._tokens_in_step = 0
        self.left_out.update(left_out)

    def leave_out(self, tokens: Mapping[str, int]) -> None:
        """So many tokens were drawn and are not trained on, by reason."""
        self.left_out.update(tokens)
        self.left_out += Counter()  # a reason without tokens is none

    def drop(self, uids: Iterable[str], reason: str) -> None:
        """These groups are not trained on."""
        for uid in uids:
            group = self._close(uid)
            self.makers[group.maker].dropped[reason] += group.num_samples
            self.leave_out({reason: group.num_tokens})

    def uids(self, state: str) -> list[str]:
        """The open groups in that state."""
        return [uid for uid, group in self._open.items() if group.state == state]

    def check(self, found: Mapping[str, Iterable[str]] | None = None) -> None:
        """Raise if the ledger does not add up, for a maker or as a whole.

        `found` has the uids of the groups that are there in fact, by state.
        """
        for state, uids in (found or {}).items():
            if astray := set(uids) ^ set(self.uids(state)):
                raise LedgerError(
                    f"by the ledger other groups are {state} than there are: {sorted(astray)[:8]}."
                )
        for maker, row in self._rows().items():
            accounted = row["trained"] + row["queued"] + sum(row["dropped"].values())
            if row["made"] != accounted + row["in_flight"]:
                raise LedgerError(f"maker {maker}: the ledger does not add up: {row}")
        trained = sum(account.trained for account in self.makers.values())
        if trained != self.trainers.total():
            raise LedgerError(
                f"makers gave {trained} samples that were trained on, trainers trained on "
                f"{dict(self.trainers)}."
            )

    def as_dict(self) -> dict[str, Any]:
        """All of it, as JSON has it; what a trainer's step has taken counts as queued."""
        counts = {name: getattr(self, name) for name in ("trainers", "staleness", "versions")}
        tokens = {
            "trained": self.trained_tokens,
            "queued": sum(group.num_tokens for group in self._open.values()),
            "left_out": dict(self.left_out),
        }
        return {"makers": self._rows(), "tokens": tokens} | {
            name: {str(number): count for number, count in sorted(of.items())}
            for name, of in counts.items()
        }

    def describe(self) -> str:
        """A table: a line a maker, and one for all; then the reasons of what was dropped."""
        rows, reasons = self._rows(), Counter[str]()
        for row in rows.values():
            reasons.update(row["dropped"])
        lines = draw_table(ledger_table(rows), flush_right=True) if rows else []
        lines += [f"  dropped: {count} ({reason})" for reason, count in reasons.items()]
        return "\n".join([*lines, f"  tokens: {tokens_in_words(**self.as_dict()['tokens'])}"])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with this ledger; what was open then is made again, but for groups of `restore`."""
        for name in ("trainers", "staleness", "versions"):
            setattr(self, name, Counter({int(key): n for key, n in state[name].items()}))
        tokens = state["tokens"]
        self.trained_tokens, self.left_out = tokens["trained"], Counter(tokens["left_out"])
        self.leave_out({MADE_AGAIN: tokens["queued"]})
        self._open, self.makers = {}, {}
        for maker, row in state["makers"].items():
            account = Account(row["made"], row["trained"], Counter(row["dropped"]))
            account.dropped[MADE_AGAIN] += row["queued"] + row["in_flight"]
            account.dropped += Counter()  # a reason without samples is none
            self.makers[int(maker)] = account

    def restore(self, maker: int, tokens: Mapping[str, int], samples_per_group: int) -> None:
        """These groups, with their tokens, of the ledger that was loaded are queued still."""
        account = self.makers[maker]
        account.dropped[MADE_AGAIN] -= samples_per_group * len(tokens)
        account.dropped += Counter()
        self.leave_out({MADE_AGAIN: -sum(tokens.values())})
        for uid, num in tokens.items():
            self._open[uid] = _Group(maker, samples_per_group, QUEUED, num)

    def _rows(self) -> dict[str, dict[str, Any]]:
        counted = Counter[tuple[int, str]]()
        for group in self._open.values():
            counted[group.maker, group.state] += group.num_samples
        return {
            str(maker): {
                "made": account.made,
                "trained": account.trained,
                "queued": counted[maker, QUEUED] + counted[maker, TAKEN],
                "dropped": dict(account.dropped),
                "in_flight": counted[maker, IN_FLIGHT],
            }
            for maker, account in sorted(self.makers.items())
        }

    def _close(self, uid: str) -> _Group:
        if uid not in self._open:
            raise LedgerError(f"nobody made samples of uid {uid}, or they are done with already.")
        return self._open.pop(uid)
