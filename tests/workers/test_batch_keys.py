import pytest
from samples import make_batch

from verl_like.errors import MissingColumnError
from workers.batch_keys import COLUMNS, require


def test_a_batch_that_has_the_columns_passes():
    require(make_batch(2), "responses", "values")


def test_a_missing_column_of_a_role_names_the_role():
    batch = make_batch(2).select(batch_keys=["responses"])
    with pytest.raises(MissingColumnError) as caught:
        require(batch, "responses", "values")
    expected = "batch has no 'values' (written by critic.compute_values); is the critic role configured?"
    assert str(caught.value) == expected


def test_a_missing_column_of_the_driver_names_the_driver():
    with pytest.raises(MissingColumnError, match="written by the driver's KL penalty\\)$"):
        require(make_batch(2), "token_level_rewards")


def test_a_column_nobody_knows_gets_the_nearest_name():
    with pytest.raises(MissingColumnError, match="Did you mean 'responses'"):
        require(make_batch(2), "response")


def test_every_tensor_column_says_its_rows_and_dtype():
    for column in COLUMNS.values():
        assert column.shape.startswith("[rows")
        assert column.dtype in ("int64", "float32", "object")
        assert column.written_by
