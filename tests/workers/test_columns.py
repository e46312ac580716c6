from __future__ import annotations

from typing import Any

import pytest

from tests.workers.samples import make_batch
from verl_like.batch.protocol import DataProto
from verl_like.calls.dispatch import registered_methods
from verl_like.errors import MissingColumnError
from workers.columns import COLUMNS, declared_columns, method_reads, require, select_reads
from workers.roles.actor import ActorWorker
from workers.roles.critic import CriticCopyWorker, CriticWorker
from workers.roles.reference import ReferenceWorker, TeacherWorker
from workers.roles.reward_model import RewardModelWorker
from workers.roles.rollout import RolloutWorker


def test_a_batch_that_has_the_columns_passes() -> None:
    require(make_batch(2), "responses", "values")


def test_a_missing_column_of_a_role_names_the_role() -> None:
    batch = make_batch(2).select(batch_keys=["responses"])
    with pytest.raises(MissingColumnError) as caught:
        require(batch, "responses", "values")
    expected = (
        "batch has no 'values' (written by critic.compute_values). Check that the run has the role "
        "critic and calls this method first."
    )
    assert str(caught.value) == expected


def test_a_missing_column_of_the_driver_names_the_driver() -> None:
    with pytest.raises(MissingColumnError, match="written by the driver's KL penalty\\)$"):
        require(make_batch(2), "token_level_rewards")


def test_a_column_nobody_knows_gets_the_nearest_name() -> None:
    with pytest.raises(MissingColumnError, match="Did you mean 'responses'"):
        require(make_batch(2), "response")


def test_a_built_in_method_gets_the_columns_it_reads_and_the_batch_has() -> None:
    chosen = select_reads(make_batch(2), ActorWorker, "update_actor")
    have = {*make_batch(2).batch.keys(), *make_batch(2).non_tensor_batch}
    assert {*chosen.batch.keys(), *chosen.non_tensor_batch} == have & {
        *(method_reads(ActorWorker, "update_actor") or ())
    }


def test_a_class_of_the_users_gets_every_column_unless_it_says_what_it_reads() -> None:
    class Mine(ActorWorker):
        def update_actor(self, data: DataProto, ptx: Any = None) -> dict[str, Any]:
            """Reads unknown columns."""
            return {}

    class Declared(Mine):
        READS = {"update_actor": ("responses",)}

    batch = make_batch(2)
    assert method_reads(Mine, "update_actor") is None
    assert select_reads(batch, Mine, "update_actor") is batch
    assert method_reads(Mine, "compute_log_prob") == method_reads(ActorWorker, "compute_log_prob")
    assert method_reads(Mine, "compute_log_prob") is not None
    assert list(select_reads(batch, Declared, "update_actor").batch.keys()) == ["responses"]


ROLES = (
    *(ActorWorker, CriticWorker, CriticCopyWorker, ReferenceWorker),
    *(RewardModelWorker, RolloutWorker, TeacherWorker),
)


def test_every_column_that_is_read_is_in_the_table() -> None:
    declared = [
        declared_columns(cls, name) for cls in ROLES for name, *_ in registered_methods(cls)
    ]
    reads = {name for columns in declared if columns is not None for name in columns.reads}
    assert "advantages" in reads
    assert reads <= COLUMNS.keys()


VERBS = ("forward", "forward_backward")
"""Their caller names the columns, so the whole batch travels."""


def test_every_method_of_a_role_that_is_split_says_what_it_reads() -> None:
    for cls in ROLES:
        for name, _, mark in registered_methods(cls):
            if mark.returns and name not in VERBS:
                assert method_reads(cls, name) is not None, (cls, name)
