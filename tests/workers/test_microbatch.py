import pytest
import torch
from samples import make_batch

from verl_like.errors import BatchError, ConfigError, MissingColumnError
from verl_like.split import split_rows
from workers.microbatch import Rows, common_passes, count_mini_batches, micro_batches, mini_batch

CPU = torch.device("cpu")
NAMES = ("responses", "response_mask", "attention_mask")


def numbered(num_rows):
    batch = make_batch(num_rows)
    batch.batch["responses"][:, 0] = torch.arange(num_rows)
    return batch


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_a_mini_batch_is_the_same_set_of_samples_at_every_number_of_ranks(world_size):
    seen = [[], [], []]
    for piece in split_rows(numbered(12), world_size):
        rows = Rows.take(piece, NAMES, CPU, world_size)
        for index in range(3):
            chosen = mini_batch(rows, index, 3, 2, None)
            seen[index] += chosen.columns["responses"][:, 0].tolist()
    assert seen == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]


def test_pad_rows_are_dropped_and_come_back_as_zeros():
    last = split_rows(numbered(7), 3)[2]
    rows = Rows.take(last, NAMES, CPU, 3)
    assert rows.columns["responses"][:, 0].tolist() == [6]
    assert (rows.start, rows.total) == (6, 7)
    assert rows.restore(torch.ones(1, 4)).sum(dim=1).tolist() == [4.0, 0.0, 0.0]


def test_counts_of_a_mini_batch_leave_out_rows_without_a_response():
    batch = make_batch(4)
    batch.batch["response_mask"][1] = 0
    chosen = mini_batch(Rows.take(batch, NAMES, CPU), 0, 1, 2, None)
    assert chosen.num_rows == 3
    assert chosen.num_tokens == int(batch.batch["response_mask"].sum())


def test_missing_passes_are_filled_with_dummies_that_no_loss_counts():
    columns = Rows.take(make_batch(3), NAMES, CPU).columns
    cuts = list(micro_batches(columns, 2, 4))
    assert [real for _, real in cuts] == [2, 1, 0, 0]
    assert torch.equal(torch.cat([cut["responses"][:real] for cut, real in cuts]), columns["responses"])
    dummy = cuts[-1][0]
    assert dummy["response_mask"].sum() == 0
    assert dummy["attention_mask"].all()


def test_a_rank_without_rows_still_has_a_dummy_to_run():
    columns = {name: column[:0] for name, column in Rows.take(make_batch(3), NAMES, CPU).columns.items()}
    assert [real for _, real in micro_batches(columns, 2, 1)] == [0]


@pytest.mark.parametrize(
    ("total", "size", "nearest"), [(12, 5, "4 or 6"), (12, 24, "12"), (7, 2, "1 or 7"), (4, 0, "1")]
)
def test_a_mini_batch_size_that_does_not_divide_is_refused_with_the_nearest_that_do(total, size, nearest):
    with pytest.raises(ConfigError, match=f"nearest that do: {nearest}\\."):
        count_mini_batches(total, size)


def test_a_micro_batch_of_no_samples_is_refused():
    with pytest.raises(ConfigError, match="micro-batch of 0"):
        common_passes(4, 0, CPU, None)


def test_a_batch_that_no_dispatch_cut_is_refused_on_more_than_one_rank():
    with pytest.raises(BatchError, match="worker group"):
        Rows.take(make_batch(4), NAMES, CPU, world_size=2)


def test_a_missing_column_names_its_writer():
    with pytest.raises(MissingColumnError, match="written by critic.compute_values"):
        Rows.take(make_batch(4).select(batch_keys=["responses"]), ("values",), CPU)
