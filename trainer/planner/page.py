"""A plan as a page that needs nothing else: its tables, memory as bars, seconds over cards."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from trainer.planner.words import Plan
from trainer.report.figures import COLOURS, Bar, as_svg, bars, new_figure, styled
from trainer.report.page import page_of
from verl_like.errors import ConfigError
from verl_like.files import write_whole
from workers.memory import GIB, RoleMemory

TEMPLATE = Path(__file__).with_name("template.html")
KEPT = ("weights", "moments", "KV cache")
"""Kinds of memory that stay between calls, as a rule;"""
OF_CALL = ("gradients", "whole layers", "activations", "back from the host")
"""those that come with one."""
COLOUR_OF = dict(zip((*KEPT, *OF_CALL), COLOURS, strict=False))
NARROWEST = 0.06
"""Share of a card from which a bar has the room for its role's name."""


def write_page(plan: Plan, path: Path) -> Path:
    """Write the page, whole or not at all."""
    from markupsafe import Markup

    roles, _ = plan.job.memory(plan.best[0])
    points = [(number, best.step) for number, best in plan.curve]
    rows = [(f"{number:,}", f"{best.step:.1f}", best.in_words) for number, best in plan.curve]
    page = page_of(TEMPLATE).render(
        name=plan.job.recipe.name,
        head=plan.head.splitlines(),
        table_rows=plan.table,
        yours=plan.yours,
        keys=plan.keys,
        memory=Markup(memory_bars(roles, plan.job.device.gib)),
        memory_text=plan.memory(),
        losers=plan.losers,
        refused=plan.refused,
        curve=Markup(curve_of(points)),
        cards=[("cards", "seconds", "placement"), *rows],
        beside=plan.beside,
    )
    try:
        write_whole(path, page)
    except OSError as error:
        raise ConfigError(f"plan.html={path} cannot be written: {error}.") from error
    return path


def memory_bars(roles: Sequence[RoleMemory], gib: float) -> str:
    """A bar for a card of each pool: what its roles keep, and the largest call; dotted: its end."""
    drawn: list[Bar] = []
    rows: dict[float, str] = {}
    pools = groupby(sorted(roles, key=lambda role: role.pool), key=lambda role: role.pool)
    for row, (pool, of_pool) in enumerate(pools):
        rows[row], end = pool, 0.0
        for role, kind, size in parts_of(list(of_pool)):
            length = size / GIB
            text = role if length > NARROWEST * gib else ""
            title = f"{role}: {kind} {length:.1f} GiB"
            drawn.append(Bar(row, end, length, COLOUR_OF[kind], title, text))
            end += length
    described = "; ".join(bar.title for bar in drawn)
    height = 1.0 + 0.5 * len(rows)
    return bars(drawn, rows, height, "GiB", COLOUR_OF, f"Memory of a card: {described}", cuts=[gib])


def parts_of(roles: Sequence[RoleMemory]) -> list[tuple[str, str, float]]:
    """(role, kind, bytes) of what the roles of a pool keep, and of the largest call."""
    found = [(role.role, *part) for role in roles for part in role.kept_parts.items()]
    largest = max(roles, key=lambda role: role.call)
    found += [(largest.role, *part) for part in largest.call_parts.items()]
    return [part for part in found if part[2] > 0]


@styled
def curve_of(points: Sequence[tuple[int, float]]) -> str:
    """Seconds of a step over cards; dotted is what as many times the cards would bring at best."""
    from matplotlib.ticker import LogLocator, NullLocator

    figure = new_figure(6.0, 3.0)
    axes = figure.add_subplot()
    numbers, seconds = zip(*points, strict=True)
    axes.loglog(numbers, seconds, color=COLOURS[0], marker="o", label="planned")
    ideal = [seconds[0] * numbers[0] / number for number in numbers]
    axes.loglog(numbers, ideal, color=COLOURS[6], linestyle=":", label="as many times as fast")
    axes.set_xticks(numbers, [f"{number:,}" for number in numbers])
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
    axes.set_xlabel("cards")
    axes.set_ylabel("seconds of a step")
    axes.legend()
    words = ", ".join(f"{number:,} cards {each:.1f} s" for number, each in points)
    return as_svg(figure, f"Seconds of a step over cards: {words}")
