"""Tensor arithmetic beside its naive forms."""

import itertools
import random

import pytest
import torch
from torch.autograd import gradcheck

from verl_like import tensor_ops
from verl_like.errors import BatchError
from verl_like.tensor_ops import (
    compute_position_ids,
    entropy_from_logits,
    get_reverse_idx,
    get_seqlen_balanced_partitions,
    logprobs_and_entropy_from_logits,
    logprobs_from_logits,
    masked_mean,
    masked_sum,
    masked_var,
    masked_whiten,
    pad_2d_list_to_length,
    pad_sequence_to_length,
)

MASK_DTYPES = [torch.bool, torch.int64, torch.float32]


@pytest.fixture(params=MASK_DTYPES, ids=str)
def masked(request):
    """Values whose masked-out half is NaN, and the mask."""
    torch.manual_seed(0)
    mask = torch.rand(5, 9) < 0.5
    values = torch.where(mask, torch.randn(5, 9), torch.nan)
    return values, mask.to(request.param)


def test_masked_reductions_equal_those_of_the_selected_values(masked):
    values, mask = masked
    inside = values[mask.bool()]
    torch.testing.assert_close(masked_sum(values, mask), inside.sum())
    torch.testing.assert_close(masked_mean(values, mask), inside.mean())
    torch.testing.assert_close(masked_var(values, mask), inside.var())
    torch.testing.assert_close(masked_var(values, mask, unbiased=False), inside.var(unbiased=False))


def test_masked_reductions_along_an_axis_equal_those_of_each_row(masked):
    values, mask = masked
    by_row = [row[inside.bool()] for row, inside in zip(values, mask, strict=True)]
    torch.testing.assert_close(
        masked_sum(values, mask, axis=-1), torch.stack([row.sum() for row in by_row])
    )
    torch.testing.assert_close(
        masked_mean(values, mask, axis=-1), torch.stack([row.mean() for row in by_row])
    )
    torch.testing.assert_close(masked_mean(values, mask, axis=(0, 1)), masked_mean(values, mask))


@pytest.mark.parametrize("shift_mean", [True, False])
def test_whitening_scales_what_is_inside_and_zeroes_the_rest(masked, shift_mean):
    values, mask = masked
    inside = values[mask.bool()]
    whitened = masked_whiten(values, mask, shift_mean)
    expected = (inside - inside.mean()) / inside.std() + (0.0 if shift_mean else inside.mean())
    torch.testing.assert_close(whitened[mask.bool()], expected)
    assert (whitened[~mask.bool()] == 0).all()


def test_an_empty_mask_gives_zero_everywhere():
    values, mask = torch.full((2, 3), torch.nan), torch.zeros(2, 3, dtype=torch.int64)
    for result in (
        masked_sum(values, mask),
        masked_mean(values, mask),
        masked_mean(values, mask, axis=-1),
        masked_var(values, mask),
        masked_whiten(values, mask),
    ):
        assert (result == 0).all()


def test_one_value_inside_has_no_variance():
    mask = torch.tensor([[1, 0]])
    assert masked_var(torch.tensor([[3.0, 1.0]]), mask) == 0
    assert masked_whiten(torch.tensor([[3.0, 1.0]]), mask).tolist() == [[0.0, 0.0]]


def test_masked_mean_has_no_gradient_outside_the_mask():
    values = torch.tensor([1.0, torch.nan, 3.0], requires_grad=True)
    masked_mean(values, torch.tensor([1, 0, 1])).backward()
    assert values.grad.tolist() == [0.5, 0.0, 0.5]


# ---------------------------------------------------------------------------- log-probs and entropy


def naive_stats(logits, labels, temperature=1.0):
    logprobs = (logits / temperature).log_softmax(dim=-1)
    return logprobs.gather(-1, labels.unsqueeze(-1)).squeeze(-1), -(logprobs.exp() * logprobs).sum(
        dim=-1
    )


@pytest.fixture
def small_chunks(monkeypatch):
    """Seven rows of eleven logits make four chunks."""
    monkeypatch.setattr(tensor_ops, "_CHUNK_BYTES", 2 * 11 * 4)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_fused_logprob_and_entropy_equal_log_softmax_and_so_do_their_gradients(temperature):
    torch.manual_seed(0)
    logits, labels = torch.randn(7, 11, dtype=torch.float64), torch.randint(11, (7,))
    weights, entropy_weights = (
        torch.randn(7, dtype=torch.float64),
        torch.randn(7, dtype=torch.float64),
    )
    grads = []
    for stats in (
        naive_stats,
        lambda x, y, t: logprobs_and_entropy_from_logits(x, y, temperature=t),
    ):
        leaf = logits.clone().requires_grad_()
        logprob, entropy = stats(leaf, labels, temperature)
        (logprob * weights + entropy * entropy_weights).sum().backward()
        grads.append((logprob, entropy, leaf.grad))
    for naive, ours in zip(*grads, strict=True):
        torch.testing.assert_close(ours, naive)


@pytest.mark.usefixtures("small_chunks")
def test_separate_forms_agree_with_the_fused_one_on_any_leading_shape():
    logits, labels = torch.randn(2, 3, 11), torch.randint(11, (2, 3))
    logprob, entropy = logprobs_and_entropy_from_logits(logits, labels)
    assert logprob.shape == entropy.shape == (2, 3)
    assert torch.equal(logprobs_from_logits(logits, labels), logprob)
    assert torch.equal(entropy_from_logits(logits), entropy)


@pytest.mark.usefixtures("small_chunks")
def test_gradients_pass_autograds_own_check():
    logits, labels = (
        torch.randn(5, 11, dtype=torch.float64, requires_grad=True),
        torch.randint(11, (5,)),
    )
    assert gradcheck(lambda x: logprobs_from_logits(x, labels), logits)
    assert gradcheck(entropy_from_logits, logits)
    assert gradcheck(lambda x: logprobs_and_entropy_from_logits(x, labels, temperature=1.3), logits)


def test_forbidden_tokens_do_not_poison_the_entropy():
    logits = torch.tensor([[0.0, 0.0, -torch.inf]], requires_grad=True)
    logprob, entropy = logprobs_and_entropy_from_logits(logits, torch.tensor([1]))
    (logprob + entropy).sum().backward()
    torch.testing.assert_close(entropy, torch.tensor([2.0]).log())
    torch.testing.assert_close(logits.grad, torch.tensor([[-0.5, 0.5, 0.0]]))


def test_bfloat16_logits_give_float32_results_and_a_bfloat16_gradient():
    logits = torch.randn(3, 50).bfloat16().requires_grad_()
    logprob = logprobs_from_logits(logits, torch.tensor([0, 1, 2]))
    torch.testing.assert_close(logprob, naive_stats(logits.float(), torch.tensor([0, 1, 2]))[0])
    logprob.sum().backward()
    assert (logprob.dtype, logits.grad.dtype) == (torch.float32, torch.bfloat16)


@pytest.mark.usefixtures("small_chunks")
def test_the_gradient_can_overwrite_the_logits():
    weight, hidden, labels = (
        torch.randn(11, 4, requires_grad=True),
        torch.randn(7, 4),
        torch.randint(11, (7,)),
    )
    grads = []
    for inplace in (False, True):
        logits = hidden @ weight.T
        logprob, entropy = logprobs_and_entropy_from_logits(
            logits, labels, inplace_backward=inplace
        )
        grads.append(torch.autograd.grad((logprob + entropy).sum(), (logits, weight)))
    assert torch.equal(grads[0][1], grads[1][1])
    assert grads[1][0].data_ptr() == logits.data_ptr()


def test_a_second_backward_over_overwritten_logits_is_refused():
    logits = torch.randn(2, 5, requires_grad=True) * 1
    logprob = logprobs_from_logits(logits, torch.tensor([0, 1]), inplace_backward=True).sum()
    logprob.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logprob.backward()


def test_2048_tokens_of_32k_vocabulary_need_at_most_64_mib_beside_logits_and_gradient(monkeypatch):
    rows, vocabulary = 512, 32768  # a quarter of the rows in a quarter of the chunk, to be quick
    monkeypatch.setattr(tensor_ops, "_CHUNK_BYTES", tensor_ops._CHUNK_BYTES // 4)
    logits = torch.randn(rows, vocabulary, requires_grad=True)
    labels = torch.randint(vocabulary, (rows,))
    peak = peak_bytes(
        lambda: sum(logprobs_and_entropy_from_logits(logits, labels)).sum().backward()
    )
    assert peak - logits.nbytes <= 64 * 2**20 / 4


def peak_bytes(work):
    """The most bytes that torch held at once during `work`, beyond those it held before."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        work()
    events = [
        event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    assert sizes, "the profiler saw no allocation"
    return max(itertools.accumulate(sizes))


# ------------------------------------------------------------------------------------------ padding


def test_token_lists_are_padded_on_the_right_to_the_longest_or_to_more():
    assert pad_2d_list_to_length([[1], [2, 3]], 9).tolist() == [[1, 9], [2, 3]]
    assert pad_2d_list_to_length([[1], [2, 3]], 9, max_length=3).tolist() == [[1, 9, 9], [2, 3, 9]]
    assert pad_2d_list_to_length([[1], [2, 3]], 9, max_length=1).shape == (2, 2)
    assert pad_2d_list_to_length([[], []], 9, max_length=2).tolist() == [[9, 9], [9, 9]]


def test_sequences_are_padded_on_either_side_and_never_cut():
    ids = torch.tensor([[1, 2]])
    assert pad_sequence_to_length(ids, 4, 0).tolist() == [[1, 2, 0, 0]]
    assert pad_sequence_to_length(ids, 4, 0, left_pad=True).tolist() == [[0, 0, 1, 2]]
    assert pad_sequence_to_length(ids, 1, 0) is ids


def test_position_ids_count_real_tokens():
    mask = torch.tensor(
        [[0, 0, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0]], dtype=torch.bool
    )
    assert compute_position_ids(mask).tolist() == [[0, 0, 0, 1, 2, 2], [0, 1, 2, 3, 4, 5], [0] * 6]
    assert compute_position_ids(mask).dtype == torch.int64


# ---------------------------------------------------------------------------------------- balancing


def spread(lengths, partitions):
    sums = [sum(lengths[row] for row in rows) for rows in partitions]
    return max(sums) - min(sums)


@pytest.mark.parametrize("equal_size", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_partitions_cover_every_row_once_and_none_is_empty(seed, equal_size):
    rng = random.Random(seed)
    k = rng.randint(1, 5)
    num_rows = k * rng.randint(1, 6) if equal_size else k + rng.randint(0, 20)
    lengths = [rng.choice([0, 1, 1, rng.randint(0, 500)]) for _ in range(num_rows)]
    partitions = get_seqlen_balanced_partitions(lengths, k, equal_size)
    assert sorted(itertools.chain(*partitions)) == list(range(num_rows))
    assert len(partitions) == k
    assert all(partitions)
    if equal_size:
        assert {len(rows) for rows in partitions} == {num_rows // k}


@pytest.mark.parametrize("seed", range(10))
def test_two_equal_partitions_are_near_the_best_of_all(seed):
    rng = random.Random(seed)
    lengths = [rng.randint(1, 100) for _ in range(8)]
    halves = (set(half) for half in itertools.combinations(range(8), 4))
    best = min(spread(lengths, [half, set(range(8)) - half]) for half in halves)
    ours = spread(lengths, get_seqlen_balanced_partitions(lengths, 2, equal_size=True))
    contiguous = spread(lengths, [range(4), range(4, 8)])
    assert best <= ours <= max(best + 20, contiguous // 4)


def test_a_large_batch_is_balanced_to_a_thousandth():
    rng = random.Random(0)
    lengths = [rng.randint(1, 4000) for _ in range(1024)]
    for k, equal_size in itertools.product((2, 7, 8), (False, True)):
        if not equal_size or len(lengths) % k == 0:
            assert (
                spread(lengths, get_seqlen_balanced_partitions(lengths, k, equal_size))
                <= sum(lengths) / k / 1000
            )


def test_equal_lengths_are_cut_the_same_way_each_time():
    assert get_seqlen_balanced_partitions(
        [5] * 6, 3, equal_size=True
    ) == get_seqlen_balanced_partitions([5] * 6, 3, equal_size=True)
    assert get_seqlen_balanced_partitions([5, 5], 2) == [[0], [1]]


def test_balancing_refuses_what_cannot_be_cut():
    with pytest.raises(BatchError, match="cannot cut 2 rows into 3"):
        get_seqlen_balanced_partitions([1, 2], 3)
    with pytest.raises(
        BatchError, match="7 rows do not make 2 partitions of equal row counts; .* or 6 rows"
    ):
        get_seqlen_balanced_partitions([1] * 7, 2, equal_size=True)


def test_the_reverse_index_undoes_a_reordering():
    order = list(itertools.chain(*get_seqlen_balanced_partitions([9, 1, 5, 7, 3, 3], 2)))
    rows = torch.arange(6)
    assert rows[order][get_reverse_idx(order)].tolist() == rows.tolist()
