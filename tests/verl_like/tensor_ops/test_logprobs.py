"""Log-probs and entropy in chunks next to log_softmax over everything."""

from functools import partial

import pytest
import torch
from torch.autograd import gradcheck

from tests.live_bytes import peak_bytes
from verl_like import tensor_ops
from verl_like.tensor_ops import (
    logprobs_and_entropy_from_logits,
    logprobs_from_logits,
    sum_pi_squared_from_logits,
)


def naive_stats(logits, labels, temperature=1.0):
    logprobs = (logits / temperature).log_softmax(dim=-1)
    return logprobs.gather(-1, labels.unsqueeze(-1)).squeeze(-1), -(logprobs.exp() * logprobs).sum(
        dim=-1
    )


@pytest.fixture
def small_chunks(monkeypatch):
    """Seven rows of eleven logits make four chunks."""
    monkeypatch.setattr(tensor_ops, "CHUNK_BYTES", 2 * 11 * 4)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_fused_logprobs_entropy_and_gradients_equal_log_softmax(temperature):
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


@pytest.mark.parametrize(
    ("dtype", "wants_entropy"), [(torch.float64, True), (torch.bfloat16, False)]
)
def test_the_compiled_form_equals_the_other(dtype, wants_entropy, monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch.manual_seed(0)
    logits, labels = torch.randn(7, 11).to(dtype), torch.randint(11, (7,))
    logits[2, 3] = -torch.inf
    labels[2] = 5
    weights, results = torch.randn(2, 7), []
    for fused in (True, False):
        leaf = logits.clone().requires_grad_()
        options = {"temperature": 0.7, "fused": fused}
        if wants_entropy:
            stats = logprobs_and_entropy_from_logits(leaf, labels, **options)
        else:
            stats = (logprobs_from_logits(leaf, labels, **options),)
        sum((weight * stat).sum() for weight, stat in zip(weights, stats, strict=False)).backward()
        assert torch.equal(leaf, logits)
        results.append([*stats, leaf.grad])
    tensor_ops._compiled.cache_clear()
    for ours, other in zip(*results, strict=True):
        torch.testing.assert_close(ours, other)


@pytest.mark.usefixtures("small_chunks")
def test_the_separate_form_agrees_with_the_fused_one_on_any_shape():
    logits, labels = torch.randn(2, 3, 11), torch.randint(11, (2, 3))
    logprob, entropy = logprobs_and_entropy_from_logits(logits, labels)
    assert logprob.shape == entropy.shape == (2, 3)
    assert torch.equal(logprobs_from_logits(logits, labels), logprob)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sums_of_squared_probabilities_equal_the_softmax(temperature):
    logits = torch.randn(7, 11, dtype=torch.float64, requires_grad=True)
    expected = (logits.detach() / temperature).softmax(dim=-1).square().sum(dim=-1)
    result = sum_pi_squared_from_logits(logits, temperature=temperature)
    torch.testing.assert_close(result, expected)
    assert not result.requires_grad
    far = sum_pi_squared_from_logits(torch.tensor([[[1e4, -1e4, -torch.inf]]]).bfloat16())
    assert far.tolist() == [[1.0]]


@pytest.mark.usefixtures("small_chunks")
def test_gradients_pass_gradcheck():
    logits, labels = (
        torch.randn(5, 11, dtype=torch.float64, requires_grad=True),
        torch.randint(11, (5,)),
    )
    assert gradcheck(lambda x: logprobs_from_logits(x, labels), logits)
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


def test_a_second_backward_over_overwritten_logits_raises():
    logits = torch.randn(2, 5, requires_grad=True) * 1
    logprob = logprobs_from_logits(logits, torch.tensor([0, 1]), inplace_backward=True).sum()
    logprob.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logprob.backward()


def test_chunks_on_a_gpu_are_about_eight_times_as_large():
    sizes = {}
    for device in ("cpu", "meta"):
        logits = torch.empty(1, 151_936, device=device).expand(1024, -1)
        sizes[device] = [chunk.stop - chunk.start for chunk in tensor_ops.row_chunks(logits)][0]
    assert sizes == {"cpu": 6, "meta": 55}


def test_2048_tokens_of_32k_vocabulary_need_at_most_64_mib_more(monkeypatch):
    rows, vocabulary = 512, 32768  # a quarter of the rows in a quarter of the chunk, to be quick
    monkeypatch.setattr(tensor_ops, "CHUNK_BYTES", tensor_ops.CHUNK_BYTES // 4)
    logits = torch.randn(rows, vocabulary, requires_grad=True)
    labels = torch.randint(vocabulary, (rows,))
    _, peak = peak_bytes(
        lambda: sum(logprobs_and_entropy_from_logits(logits, labels)).sum().backward()
    )
    assert peak - logits.nbytes <= 64 * 2**20 / 4
