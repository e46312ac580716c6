"""The training engine on a GPU:

16-bit types, packed rows under each attention, offloading. Skipped without one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.workers.gradients import ACTOR_COLUMNS, gradients
from tests.workers.samples import make_batch, started, tiny_config
from verl_like.batch.ragged import RaggedTensor
from workers.roles.actor import ActorWorker
from workers.training.microbatch import MicroBatchBudget
from workers.training.passes import attention
from workers.training.passes.attention import RowLayout, VarlenKernel, packed_attention
from workers.training.passes.packing import RowPasses
from workers.training.passes.varlen import LIBRARIES, find_kernel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]


def kernel_or_skip(name: str) -> VarlenKernel:
    """Return the kernel that `attn_implementation=name` uses, unless it is another package's."""
    kernel, reason = find_kernel(name, torch.device("cuda"), torch.bfloat16, 64, True)
    if kernel is None or name in LIBRARIES and LIBRARIES[name].package not in kernel.name.split():
        pytest.skip(reason)
    return kernel


def actor(tiny_dir: Path, *, strategy: str = "fsdp", **model: Any) -> ActorWorker:
    settings = {"ppo_mini_batch_size": 8, "entropy_coeff": 0.01, "use_kl_loss": True}
    config = tiny_config(tiny_dir, model={"compile": "off", **model}, strategy=strategy, **settings)
    worker = started(ActorWorker, config, 10)
    assert worker.engine.device.type == "cuda"
    return worker


@pytest.mark.parametrize(
    ("dtype", "attention", "limit"),
    [
        ("float32", "sdpa", 1e-5),
        ("bfloat16", "sdpa", 5e-2),
        ("bfloat16", "auto", 5e-2),
        *(("bfloat16", name, 5e-2) for name in LIBRARIES),
    ],
)
def test_packed_rows_match_padded_rows_on_a_gpu(
    tiny_dir: Path, dtype: str, attention: str, limit: float
) -> None:
    if attention in LIBRARIES:
        kernel_or_skip(attention)
    batch, log_probs, grads = make_batch(8), [], []
    for packed in (True, False):
        policy = actor(
            tiny_dir,
            use_remove_padding=packed,
            compute_dtype=dtype,
            attn_implementation=attention,
        )
        assert policy.engine.packs == packed
        log_probs.append(policy.compute_log_prob(batch)[0].batch["old_log_probs"])
        grads.append(gradients(policy, batch, ACTOR_COLUMNS, MicroBatchBudget(rows=3)))
    torch.testing.assert_close(log_probs[0], log_probs[1], atol=limit, rtol=0)
    for name, gradient in grads[1].items():
        assert (grads[0][name] - gradient).norm() <= 2 * limit * gradient.norm(), name


@pytest.mark.parametrize("shared", [None, [0, 17, 1, 40]])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (7, None), (200, None), (None, 2.0)])
@pytest.mark.parametrize("name", ["auto", *LIBRARIES])
def test_a_kernel_for_packed_rows_matches_sdpa_in_bfloat16(
    name: str, window: int | None, softcap: float | None, shared: list[int] | None
) -> None:
    torch.manual_seed(0)
    lengths, results, kernel = [300, 170, 64, 50], [], kernel_or_skip(name)
    layout = RowLayout(lengths, torch.device("cuda"), shared=shared)
    states = [
        torch.randn(1, heads, sum(layout.queries), 64, device="cuda", dtype=torch.bfloat16)
        for heads in (6, 2, 2)
    ]
    settings: Any = {"row_layout": layout, "sliding_window": window, "softcap": softcap}
    for used_kernel in (kernel, None):
        q, k, v = leaves = [state.clone().requires_grad_() for state in states]
        output, _ = packed_attention(None, q, k, v, None, kernel=used_kernel, **settings)
        results.append([output, *torch.autograd.grad(output.float().square().sum(), leaves)])
    for ours, theirs in zip(*results, strict=True):
        assert (ours - theirs).float().norm() < 2e-2 * theirs.float().norm()


@pytest.mark.parametrize("name", ["auto", *LIBRARIES])
def test_deterministic_gradients_of_a_kernel_are_equal_bit_for_bit(name: str) -> None:
    kernel, layout = kernel_or_skip(name), RowLayout([300, 1700], torch.device("cuda"))
    query, key, value = states = [
        torch.randn(1, heads, 2000, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for heads in (6, 2, 2)
    ]
    sums = []
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(5):
            output, _ = packed_attention(
                None, query, key, value, None, row_layout=layout, kernel=kernel
            )
            sums.append(torch.autograd.grad(output.sum(), states))
    finally:
        torch.use_deterministic_algorithms(False)
    for others in sums[1:]:
        assert all(map(torch.equal, others, sums[0]))


def test_the_default_is_flash_attention_in_bfloat16_over_float32_weights(
    tiny_dir: Path,
) -> None:
    engine = actor(tiny_dir).engine
    assert engine.kernel is not None
    assert engine.kernel.dtype == torch.bfloat16
    assert {weight.dtype for weight in engine.parameters()} == {torch.float32}


def test_gradients_in_bfloat16_match_float32_up_to_rounding(
    tiny_dir: Path,
) -> None:
    exact, rounded = (
        gradients(actor(tiny_dir, compute_dtype=dtype), make_batch(8), ACTOR_COLUMNS)
        for dtype in ("float32", "bfloat16")
    )
    for name, gradient in exact.items():
        assert rounded[name].dtype == torch.float32
        assert (rounded[name] - gradient).norm() < 0.1 * gradient.norm(), name


def test_offloaded_states_are_on_the_gpu_only_during_use(tiny_dir: Path) -> None:
    offloaded, resident = (actor(tiny_dir, strategy=name) for name in ("fsdp_offload", "fsdp"))
    for policy in (offloaded, resident):
        policy.update_actor(make_batch(8))
    assert {p.device.type for p in offloaded.engine.parameters()} == {"cpu"}
    assert all(p.is_pinned() for p in offloaded.engine.parameters())
    states = [t for s in offloaded.engine.optimizer.state.values() for t in s.values()]
    assert all(state.is_pinned() for state in states if state.numel() > 1)
    assert {p.device.type for p in resident.engine.parameters()} == {"cuda"}
    assert offloaded.weights_checksum() == resident.weights_checksum()


def test_gradients_of_shared_prefixes_are_summed_in_a_fixed_order() -> None:
    rows = [torch.tensor([1, 2, 3, 4, last]) for last in range(5, 13)]
    ids = RaggedTensor.from_rows(rows, 5)
    columns = {"input_ids": ids, "position_ids": ids.with_values(torch.arange(5).repeat(8))}
    reads = ids.with_values(torch.arange(40) % 5 == 4)
    feed = RowPasses("packed", shares=True).feed(columns, reads, torch.device("cuda"))
    states = torch.randn(12, 64, device="cuda", requires_grad=True)
    weights = torch.randn(40, 64, device="cuda")
    sums = []
    for _ in range(20):
        copies = attention._WholeRows.apply(states, feed.inputs["row_layout"])
        sums.append(torch.autograd.grad((copies * weights).sum(), states)[0])
    assert all(torch.equal(total, sums[0]) for total in sums)
