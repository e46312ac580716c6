"""Check that a loss or an estimator is right however its batch is cut, padded or ordered.

    from verl_like import check_loss

    def test_my_loss():
        check_loss(my_loss)                        # raises BrokenRelation, in one sentence

`verl-like check-loss` does the same for a name, a file, `trl:NAME` or `verl:NAME`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from trainer.check_loss import foreign
from trainer.check_loss.batches import Batch, all_batches, smaller
from trainer.check_loss.relations import RELATIONS, Relation
from trainer.check_loss.subject import Subject, subject_of
from verl_like.errors import ConfigError, nearest
from workers.losses.aggregate import AGGREGATIONS


class BrokenRelation(AssertionError):
    """A relation that does not hold, with a small batch that shows it."""

    def __init__(self, subject: Subject, name: str, batch: Batch) -> None:
        self.relation, self.batch = name, batch
        relation = RELATIONS[name]
        shown = {name: column for name, column in batch.items() if name in subject.reads}
        columns = "".join(f"\n  {name} = {column.tolist()}" for name, column in shown.items())
        mode = f" with {subject.mode}" if subject.mode else ""
        words = f"{difference(subject, relation, batch)}. Likely cause: {relation.cause}"
        super().__init__(f"{subject.name}{mode} breaks {name}: {words}{columns}")


def check_loss(
    target: Any, kind: str | None = None, *, skip: Sequence[str] = (), **settings: Any
) -> list[str]:
    """Try every relation on small batches, and return their names; raise `BrokenRelation` if not.

    `target` is a function, or a name as the command takes it; `kind` is policy, value, preference
    or estimator; `skip` names relations to leave out; `settings` fill parameters of these names.
    """
    is_foreign = isinstance(target, str) and target.startswith(foreign.SYSTEMS)
    subject = (foreign.subject_of if is_foreign else subject_of)(target, kind, **settings)
    unknown = {*settings} - {*subject.reads, "loss_agg_mode"}
    if unknown and not is_foreign:
        words = f"has no parameter {min(unknown)!r}.{nearest(min(unknown), subject.reads)}"
        raise ConfigError(f"{subject.name} {words}")
    for name in skip:
        if name not in RELATIONS:
            names = ", ".join(RELATIONS)
            raise ConfigError(f"no relation {name!r}: {names}.{nearest(name, RELATIONS)}")
    left_out, of_kind = {*skip, *subject.exempt}, all_batches(subject.kind)
    chosen = {name: each for name, each in RELATIONS.items() if name not in left_out}
    chosen = {name: each for name, each in chosen.items() if subject.kind in each.kinds}
    _try(subject, chosen, of_kind)
    in_every_mode = {name: each for name, each in chosen.items() if each.every_mode}
    for mode in AGGREGATIONS if "loss_agg_mode" in subject.reads else ():
        other = replace(subject, mode=mode)
        with suppress(ConfigError):  # it does not take every aggregation
            other.at_once(of_kind[0])
            _try(other, in_every_mode, of_kind[1::3])
    return [*chosen]


def _try(subject: Subject, chosen: Mapping[str, Relation], of_kind: Sequence[Batch]) -> None:
    for name, relation in chosen.items():
        for batch in of_kind:
            if difference(subject, relation, batch):
                raise BrokenRelation(subject, name, shrink(subject, relation, batch))


def difference(subject: Subject, relation: Relation, batch: Batch) -> str:
    """Return the two numbers that differ, in words, or "" if the relation holds on the batch."""
    for done, expected, found in relation.compare(subject, batch):
        for name, column in expected.items():
            pair = column.double().flatten(), found[name].double().flatten()
            close = torch.isclose(*pair, rtol=relation.tolerance, atol=relation.tolerance)
            close |= pair[0].isnan() & pair[1].isnan()
            if not bool(close.all()):
                worst = (pair[0] - pair[1]).abs().nan_to_num(torch.inf).argmax()
                return f"{name} is {pair[1][worst]:.6g}, not {pair[0][worst]:.6g}, {done}"
    return ""


def shrink(subject: Subject, relation: Relation, batch: Batch) -> Batch:
    """Return the smallest batch with a token that still breaks the relation."""
    for candidate in smaller(batch):
        try:
            has_token = "response_mask" not in batch or bool(candidate["response_mask"].any())
            if has_token and difference(subject, relation, candidate):
                return shrink(subject, relation, candidate)
        except ConfigError:  # the function cannot take it
            continue
    return batch
