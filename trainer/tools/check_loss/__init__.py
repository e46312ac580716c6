"""Check that a loss or an estimator is right however its batch is split, padded or ordered.

    from verl_like import check_loss

    def test_my_loss():
        check_loss(my_loss)                        # raises BrokenRelation if it is wrong

`verl-like check-loss` does the same for a name, a file, `trl:NAME` or `verl:NAME`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from trainer.tools.check_loss import foreign
from trainer.tools.check_loss.batches import Batch, all_batches, has_token, smaller
from trainer.tools.check_loss.relations import NAMES, RELATIONS, TOLERANCES, CallRecorder, Relation
from trainer.tools.check_loss.subject import Subject, check_name, subject_of
from verl_like.errors import ConfigError
from workers.losses.aggregate import AGGREGATIONS


class BrokenRelation(AssertionError):
    """Raised if a relation does not hold; the message has a small batch that shows it."""

    def __init__(self, subject: Subject, relation: Relation, batch: Batch) -> None:
        self.relation, self.batch = relation.__name__, batch
        cause = " ".join(str(relation.__doc__).partition("Likely cause: ")[2].split())
        with CallRecorder() as record, suppress(ConfigError):
            subject.measure(batch)
        for dtype in record.dtypes & {torch.float16, torch.bfloat16}:
            cause = f"it rounds numbers to {dtype}; compute a loss in float32. Or: {cause}"
        columns = [f"\n  {key} = {batch[key].tolist()}" for key in batch if key in subject.reads]
        mode = f" with {subject.mode}" if subject.mode else ""
        words = f"{difference(subject, relation, batch)}. Likely cause: {cause}"
        super().__init__(f"{subject.name}{mode} breaks {self.relation}: {words}{''.join(columns)}")


def check_loss(
    target: Any, kind: str | None = None, *, skip: Sequence[str] = (), **settings: Any
) -> list[str]:
    """Check every relation on small batches, and return the names of the relations.

        check_loss(my_loss)                             # its parameters are filled by name
        check_loss("trl:dapo", skip=["extreme_ratios"])

    Args:
        target: a function, or a name: a built-in one, FILE.py:NAME, `trl:NAME` or `verl:NAME`.
        kind: policy, value, preference or estimator; by default, the one whose columns and
            settings fill most parameters of the function.
        skip: names of relations to leave out.
        settings: values of the function's parameters, by name.

    Raises:
        BrokenRelation: a relation does not hold; the message has a small batch that shows it.
        ConfigError: a name is unknown, or the function's parameters cannot be filled.
    """
    is_foreign = str(target).partition(":")[0] in foreign.VERSIONS
    subject = (foreign.subject_of if is_foreign else subject_of)(target, kind, **settings)
    for key in settings:
        check_name(key, subject.settings, f"{subject.name} has no setting")
    for name in skip:
        check_name(name, NAMES, "there is no relation")
    left_out = {*skip, *subject.exempt}
    chosen = [relation for relation in RELATIONS[subject.kind] if relation.__name__ not in left_out]
    batches = all_batches()
    _try(subject, chosen, batches)
    if "loss_agg_mode" in subject.reads:
        for mode in AGGREGATIONS:
            with suppress(ConfigError):  # the loss does not support every aggregation
                _try(replace(subject, mode=mode), chosen, batches[1::3])
    return [relation.__name__ for relation in chosen]


def _try(subject: Subject, relations: Sequence[Relation], batches: Sequence[Batch]) -> None:
    for relation in relations:
        for batch in batches:
            if difference(subject, relation, batch):
                raise BrokenRelation(subject, relation, shrink(subject, relation, batch))


def difference(subject: Subject, relation: Relation, batch: Batch) -> str:
    """Describe two numbers that differ; return "" if the relation holds on the batch."""
    limit = TOLERANCES.get(relation.__name__, 1e-6)
    for change, expected, actual in relation(subject, batch):
        for name, column in expected.items():
            pair = column.double().flatten(), actual[name].double().flatten()
            is_close = torch.isclose(*pair, rtol=limit, atol=limit, equal_nan=True)
            if not bool(is_close.all()):
                worst = (pair[0] - pair[1]).abs().nan_to_num(torch.inf).argmax()
                return f"{name} is {pair[1][worst]:.6g}, not {pair[0][worst]:.6g}, {change}"
    return ""


def shrink(subject: Subject, relation: Relation, batch: Batch) -> Batch:
    """Return a smallest batch that has a token and still breaks the relation."""
    for candidate in smaller(batch):
        with suppress(ConfigError):  # the function rejects this batch
            if has_token(candidate) and difference(subject, relation, candidate):
                return shrink(subject, relation, candidate)
    return batch
