"""A plan in words: the best placements, their memory, why others lose, what more cards bring."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from trainer.memory import memory_table
from trainer.planner.job import Job, layout_keys, sizes_of
from trainer.planner.search import Placement
from verl_like.errors import ConfigError
from verl_like.terminal import draw_table
from workers.memory import GIB

SHOWN = 5
MOST_CARDS = 4096
Table = list[tuple[str, ...]]
"""Its first row is the heading."""


@dataclass(frozen=True, eq=False)
class Plan:
    """What is found for a job."""

    job: Job
    found: Sequence[Placement]
    """The fastest of every way to share the cards."""
    best: Sequence[Placement]
    """The fastest that a run would begin with."""
    refused: Sequence[str]
    """Why it would refuse faster ones."""
    beside: str = ""
    """How it compares with another recipe of the same keys."""

    @classmethod
    def of(cls, job: Job) -> Plan:
        """Search; a job that fits nowhere is refused with what would be enough."""
        found = job.best(job.num_cards, SHOWN)
        if not found:
            raise fits_nowhere(job)
        best, refused = sifted(job, found)
        if not best:
            raise ConfigError(f"No placement is valid. The fastest by numbers: {refused[0]}")
        return cls(job, found, best, refused)

    @property
    def head(self) -> str:
        """What is planned, and what the numbers are worth."""
        job = self.job
        cards = f"{job.num_cards:,} x {job.device.name}, {job.per_node} in a machine"
        return f"{cards}: {job.rows_in_words}\n{_worth(job)}"

    @property
    def table(self) -> Table:
        """The best placements."""
        stages = self.job.stages
        lines: Table = [("", "seconds", *stages, "GiB", "limited by", "placement")]
        for number, placement in enumerate(self.best, 1):
            most = max(pool.bytes for pool in placement.pools) / GIB
            of_stages = [f"{each:.1f}" for each in placement.seconds]
            cells = f"{placement.step:.1f}", *of_stages, f"{most:.0f}", placement.limit(stages)
            lines.append((str(number), *cells, self._placed(placement)))
        return lines

    def _placed(self, placement: Placement) -> str:
        """Where its roles are; of a role alone how it is laid out, too."""
        if len(self.job.roles) > 1:
            return placement.in_words
        (option,) = placement.pools[0].options
        return ", ".join([placement.in_words, *(f"{k}={v}" for k, v in option.keys.items())])

    @property
    def keys(self) -> list[str]:
        """Of the first, to paste."""
        return self.job.overrides(self.best[0])

    @functools.cached_property
    def yours(self) -> list[str]:
        """The user's placement beside the first, and the keys of its layouts; none without one."""
        pools = self.job.own_pools
        if not pools:
            return []
        words = " | ".join(f"{' + '.join(roles)} on {cards}" for roles, cards in pools)
        placement = self.job.own_placement()
        if placement is None:
            return [f"Your placement fits in no layout: {words}."]
        times = placement.step / self.best[0].step
        first = f"Your placement: {placement.step:.1f} s, {times:.2f} times the first: {words}."
        return [first, *layout_keys(placement)]

    def memory(self, max_columns: int | None = None) -> str:
        """Of every card of the first, by role and kind."""
        roles, devices = self.job.memory(self.best[0])
        return memory_table(roles, devices, max_columns)

    @property
    def losers(self) -> list[str]:
        """What is not shown, and where it loses."""
        return self._other_shares() if len(self.job.roles) > 1 else self._other_layouts()

    def _other_shares(self) -> list[str]:
        """The fastest of every other way to share cards."""
        best, lines, stages = self.best[0], [], self.job.stages
        seen: set[Hashable] = {placement.shares for placement in self.best}
        for placement in self.found:
            if placement.shares in seen:
                continue
            seen.add(placement.shares)
            slower = [a - b for a, b in zip(placement.seconds, best.seconds, strict=True)]
            at = max(range(len(slower)), key=slower.__getitem__)
            pool = max(placement.pools, key=lambda pool: pool.seconds[at])
            lines.append(
                f"{placement.step:.1f} s, {placement.in_words}: {stages[at]} of "
                f"{' + '.join(pool.roles)} takes {slower[at]:.1f} s more"
            )
        return lines

    def _other_layouts(self) -> list[str]:
        """With every value of a key that none of the best has: the fastest, or the smallest."""
        job, best = self.job, self.best[0]
        shown = {item for each in self.best for item in each.pools[0].options[0].keys.items()}
        tried = job.tried(job.roles[0], best.pools[0].cards)
        values = dict.fromkeys(item for option in tried for item in option.keys.items())
        lines = []
        for key, value in values:
            if (key, value) in shown:
                continue
            having = [option for option in tried if option.keys.get(key) == value]
            fitting = [sum(option.seconds) for option in having if job.fits(option)]
            if fitting:
                what = f"{min(fitting):.1f} s, {min(fitting) - best.step:.1f} s more"
            else:
                least = min(option.kept + option.call for option in having) / GIB
                what = f"takes {least:.1f} GiB at least"
            lines.append(f"{key}={value}: {what}")
        return lines

    @functools.cached_property
    def curve(self) -> list[tuple[int, Placement]]:
        """Cards and the fastest placement on them, from the fewest that are enough."""
        job = self.job
        doubling = {2**power for power in range(job.num_cards.bit_length())} | {job.num_cards}
        numbers = sorted(doubling & set(sizes_of(job.num_cards, job.per_node)))
        return [(number, best[0]) for number in numbers if (best := job.best(number, 1))]

    def text(self, max_columns: int | None = None) -> str:
        """All of it."""
        curve = [
            f"{number:>5,} cards  {best.step:>8.1f} s  {best.in_words}"
            for number, best in self.curve
        ]
        others = "ways to share the cards" if len(self.job.roles) > 1 else "layouts"
        parts = [
            self.head,
            "\n".join(draw_table(self.table, max_columns)),
            *([listed(self.yours[0], self.yours[1:])] if self.yours else []),
            listed("The first as keys:", self.keys),
            self.memory(max_columns),
            listed(f"Other {others} lose:", self.losers or ["there are none"]),
            *([listed("Refused as a run would refuse it:", self.refused)] if self.refused else []),
            listed("Cards and seconds of a step, from the fewest that fit:", curve),
            *([self.beside] if self.beside else []),
        ]
        return "\n\n".join(parts)


def _worth(job: Job) -> str:
    """Where the seconds come from."""
    rates = job.device.rates
    if job.factors:
        factors = ", ".join(
            f"{role}.{method} {of:.2f}" for (role, method), of in job.factors.items()
        )
        return f"Seconds are corrected by the run; its calls took, of what is predicted: {factors}"
    if job.device.measured:
        return f"Seconds are predicted from what {job.device.name} did in {job.device.measured}."
    return (
        f"Seconds are arithmetic, nothing is measured: {rates.flops:g} of the card's operations, "
        f"{rates.memory:g} of its memory's and {rates.link:g} of its links' bytes a second are "
        "assumed to be reached."
    )


def listed(title: str, lines: Sequence[str]) -> str:
    """Lines under a title."""
    return "\n".join([title, *(f"  {line}" for line in lines)])


def sifted(job: Job, found: Sequence[Placement]) -> tuple[list[Placement], list[str]]:
    """The fastest that a run would begin with, and why it would refuse faster ones."""
    best: list[Placement] = []
    refused = []
    for placement in found:
        error = job.why_refused(placement)
        if error is None:
            best.append(placement)
        else:
            refused.append(f"{placement.in_words}: {error}")
        if len(best) == SHOWN:
            break
    return best, refused


def compared(job: Job, other: Job) -> str:
    """Which of two recipes with the same keys is faster, in a line."""
    own, others = (each.best(each.num_cards, 1) for each in (job, other))
    name = f"verl-like {other.recipe.name}"
    if not others:
        return f"As `{name}` it does not fit."
    seconds, ours = others[0].step, own[0].step
    faster = ours / seconds
    much = f"{faster:.2f} times as fast" if faster >= 1 else f"{1 / faster:.2f} times as slow"
    return f"As `{name}`: {seconds:.1f} s a step, {much}: {others[0].in_words}."


def fits_nowhere(job: Job) -> ConfigError:
    """Which role is too large, and how many cards would do."""
    needs, num_cards = [], job.num_cards
    for role in job.roles:
        least = job.least_bytes(role, num_cards)
        needs.append(f"{role}: {'cannot be laid out' if least is None else f'{least / GIB:.1f}'}")
    enough = None
    number = 2 * num_cards
    while enough is None and number <= MOST_CARDS:
        if job.best(number, 1):
            enough = number
        number *= 2
    way_out = (
        f"{enough:,} of these cards are enough"
        if enough
        else f"{MOST_CARDS:,} of these cards are not enough either: take larger ones"
    )
    model = job.model_key
    return ConfigError(
        f"No placement fits on {num_cards:,} x {job.device.name} of {job.device.gib:g} GiB. GiB "
        f"on each at least, alone on all of them: {', '.join(needs)}. {way_out}; or take shorter "
        f"rows, LoRA ({model}.lora_rank), or {model}.dtype=bfloat16."
    )
