"""Packed rows by FlashAttention, on stand-ins: the kernel, its arguments, its results."""

from __future__ import annotations

import importlib
import inspect
import logging
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.workers.gradients import ACTOR_COLUMNS, gradients
from tests.workers.samples import make_batch, started, tiny_config
from tests.workers.training.rank_layouts import saved
from tests.workers.varlen_kernels import (
    flash_attn,
    flash_attn_varlen_func,
    package,
    reference,
    signature_of,
    varlen_attn,
    varlen_attn_without_groups,
)
from workers.models import attention as model_attention
from workers.roles.actor import ActorWorker
from workers.training import build_model
from workers.training.passes import attention, varlen
from workers.training.passes.attention import RowLayout, VarlenKernel, describe, packed_attention
from workers.training.passes.varlen import find_kernel, flash_attn_kernel, torch_varlen_kernel

CPU, BFLOAT16, FLOAT32 = torch.device("cpu"), torch.bfloat16, torch.float32
FLASH = "flash_attn.flash_attn_interface"
FLASH_4, FLASH_3, FLASH_2 = (
    VarlenKernel(
        library.package, flash_attn_kernel(flash_attn(name), library.unbounded), FLOAT32, True
    )
    for name, library in varlen.LIBRARIES.items()
)
TORCH = VarlenKernel("torch", torch_varlen_kernel(varlen_attn), FLOAT32)
KERNELS = [
    FLASH_4,
    FLASH_3,
    FLASH_2,
    TORCH,
    VarlenKernel("torch 2.11", torch_varlen_kernel(varlen_attn_without_groups), FLOAT32),
]


def attended(
    states: Sequence[torch.Tensor],
    layout: RowLayout,
    kernel: VarlenKernel | None,
    **settings: Any,
) -> torch.Tensor:
    query, key, value = states
    settings |= {"row_layout": layout, "kernel": kernel}
    return packed_attention(None, query, key, value, None, **settings)[0]


def installed(versions: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate these versions of packages, and no others."""

    def version(package: str) -> str:
        if package not in versions:
            raise PackageNotFoundError(package)
        return versions[package]

    monkeypatch.setattr(varlen.importlib.metadata, "version", version)


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate an A100 with torch's kernel and without flash-attn."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    installed({"flash-attn": "2.8.3"}, monkeypatch)
    monkeypatch.setattr(varlen, "kernel_blocker", lambda *_: "")
    monkeypatch.setattr(model_attention, "kernel_blocker", lambda *_: "")
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    for library in varlen.LIBRARIES.values():
        monkeypatch.setitem(sys.modules, library.module, None)
    model_attention.warn_once.cache_clear()


def parameters(signature: inspect.Signature) -> list[tuple[str, Any]]:
    return [(one.name, one.default) for one in signature.parameters.values()]


@pytest.mark.parametrize("name", varlen.LIBRARIES)
def test_a_stand_in_has_the_signature_of_the_installed_package(name: str) -> None:
    try:
        package = importlib.import_module(varlen.LIBRARIES[name].module)
    except ImportError as error:
        pytest.skip(str(error))
    function = inspect.signature(package.flash_attn_varlen_func)
    assert parameters(function) == parameters(signature_of(name))


def test_the_stand_in_for_torch_has_parameters_of_torch() -> None:
    from torch.nn.attention.varlen import varlen_attn as installed_function

    ours = inspect.signature(varlen_attn, eval_str=True).parameters
    theirs = inspect.signature(installed_function, eval_str=True).parameters
    shared = {name: theirs[name].default for name in ours if name in theirs}
    assert shared == {name: ours[name].default for name in shared}
    assert {*ours} - {*theirs} <= {"enable_gqa"}, "which 2.11 lacks"


def test_flash_attention_is_deterministic_if_torch_is(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def function(*states: Any, **settings: Any) -> Any:
        seen.append(settings["deterministic"])
        return flash_attn_varlen_func(*states, **settings)

    spy = VarlenKernel("flash-attn", flash_attn_kernel(function), FLOAT32)
    states = [torch.randn(1, 2, 4, 8) for _ in range(3)]
    for is_on in (False, True):
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda on=is_on: on)
        attended(states, RowLayout([4], CPU), spy)
    assert seen == [False, True]


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("window", [None, 3, 50])
@pytest.mark.parametrize(("size", "value_size"), [(16, 16), (12, 12), (24, 8)])
def test_a_kernel_matches_rectangles(
    kernel: VarlenKernel, window: int | None, size: int, value_size: int
) -> None:
    torch.manual_seed(0)
    lengths, results = [9, 8, 3, 1, 40], []
    shapes = (4, size), (2, size), (2, value_size)
    states = [torch.randn(1, heads, sum(lengths), width) for heads, width in shapes]
    for kernel_or_none in (kernel, None):
        leaves = [state.clone().requires_grad_() for state in states]
        layout = RowLayout(lengths, CPU)
        output = attended(leaves, layout, kernel_or_none, scaling=0.3, sliding_window=window)
        results.append([output, *torch.autograd.grad(output.square().sum(), leaves)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("window", [None, 6])
def test_a_kernel_attends_to_shared_prefixes_as_rows_alone_do(
    kernel: VarlenKernel, window: int | None
) -> None:
    torch.manual_seed(0)
    lengths, shared = [9, 12, 11, 30, 4, 7], [0, 5, 5, 8, 3, 4]
    layout = RowLayout(lengths, CPU, shared=shared)
    shapes = (6, 24), (2, 24), (2, 8)
    states = [torch.randn(1, heads, sum(layout.queries), size) for heads, size in shapes]
    results = []
    for kernel_or_none in (kernel, None):
        leaves = [state.clone().requires_grad_() for state in states]
        output = attended(leaves, layout, kernel_or_none, scaling=0.3, sliding_window=window)
        results.append([output, *torch.autograd.grad(output.square().sum(), leaves)])
    leaves = [state.clone().requires_grad_() for state in states]
    rows = [leaf[:, :, layout.sources] for leaf in leaves]
    output = attended(rows, RowLayout(lengths, CPU), None, scaling=0.3, sliding_window=window)
    is_computed = [torch.arange(n) >= first for n, first in zip(lengths, shared, strict=True)]
    output = output[:, torch.cat(is_computed)]
    results.append([output, *torch.autograd.grad(output.square().sum(), leaves)])
    for ours, rectangles, alone in zip(*results, strict=True):
        for other in (ours, rectangles):
            assert (other - alone).abs().max() <= 1e-6 * alone.abs().max()


def test_a_kernel_that_aligns_queries_with_the_first_keys_is_not_used() -> None:
    def from_the_left(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **rest: Any) -> Any:
        counts = rest["cu_seqlens_q"].diff().tolist()
        rows = (part.split(rest["cu_seqlens_k"].diff().tolist()) for part in (k, v))
        k, v = (
            torch.cat([row[:count] for row, count in zip(part, counts, strict=True)])
            for part in rows
        )
        bounds = {"cu_seqlens_k": rest["cu_seqlens_q"], "max_seqlen_k": rest["max_seqlen_q"]}
        return flash_attn_varlen_func(q, k, v, **rest | bounds)

    kernel = VarlenKernel("old", flash_attn_kernel(from_the_left), FLOAT32)
    assert varlen.largest_error(kernel, CPU) > varlen.LARGEST_ERROR
    assert all(varlen.largest_error(each, CPU) < 1e-5 for each in KERNELS)


def test_states_are_cast_to_the_kernel_s_type_and_the_output_back() -> None:
    seen = []

    def function(query: torch.Tensor, *states: Any, **settings: Any) -> torch.Tensor:
        seen.append(query.dtype)
        return flash_attn_varlen_func(query, *states, **settings)

    kernel = VarlenKernel("flash-attn", flash_attn_kernel(function), BFLOAT16)
    states = [torch.randn(1, 2, 4, 8) for _ in range(3)]
    output = attended(states, RowLayout([4], CPU), kernel)
    assert (seen, output.dtype) == ([BFLOAT16], FLOAT32)


def test_states_of_the_kernel_s_type_are_not_copied() -> None:
    states = [torch.randn(1, 2, 4, 8) for _ in range(3)]
    seen: list[int] = []

    def function(*arguments: torch.Tensor, **settings: Any) -> torch.Tensor:
        seen.extend(state.data_ptr() for state in arguments[:3])
        return flash_attn_varlen_func(*arguments, **settings)

    attended(states, RowLayout([4], CPU), VarlenKernel("", flash_attn_kernel(function), FLOAT32))
    assert seen == [state.data_ptr() for state in states]


def test_heads_too_large_for_a_kernel_use_rectangles() -> None:
    states = [torch.randn(1, 1, 4, 512) for _ in range(3)]
    layout = RowLayout([3, 1], CPU)
    assert torch.equal(attended(states, layout, FLASH_2), attended(states, layout, None))


@pytest.mark.parametrize("kernel", [*KERNELS[:4], None], ids=lambda kernel: kernel and kernel.name)
@pytest.mark.parametrize("window", [None, 3])
def test_scores_are_capped_by_a_kernel_or_in_rectangles(
    kernel: VarlenKernel | None, window: int | None
) -> None:
    torch.manual_seed(0)
    lengths, cap, scale = [9, 8, 3, 1, 40], 0.7, 0.9
    layout = RowLayout(lengths, CPU)
    states = [torch.randn(1, heads, sum(lengths), 16) for heads in (4, 2, 2)]
    results = []
    for is_twin in (False, True):
        leaves = [state.clone().requires_grad_() for state in states]
        if is_twin:
            query, key, value = (leaf[0].transpose(0, 1) for leaf in leaves)
            sizes = (-1 if window is None else window - 1, 0)
            output = reference(query, key, value, layout.bounds, scale, sizes, cap)[None]
        else:
            settings = {"scaling": scale, "sliding_window": window, "softcap": cap}
            output = attended(leaves, layout, kernel, **settings)
        results.append([output, *torch.autograd.grad(output.square().sum(), leaves)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("on_cuda")
def test_auto_uses_flash_attn_if_installed_otherwise_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, reason = find_kernel("auto", CPU, BFLOAT16)
    assert kernel is not None
    assert kernel.name == "torch.nn.attention.varlen"
    assert 'pip install -e ".[flash-attn]" --no-build-isolation' in reason

    monkeypatch.setitem(sys.modules, FLASH, package(FLASH))
    for needs_softcap in (False, True):
        kernel, reason = find_kernel("auto", CPU, BFLOAT16, 64, needs_softcap)
        assert kernel is not None
        assert (kernel.name, reason) == ("flash-attn 2.8.3", "")
        assert kernel.has_softcap == needs_softcap
    assert find_kernel("sdpa", CPU, BFLOAT16)[0] is None
    assert find_kernel("eager", CPU, BFLOAT16)[0] is None


@pytest.mark.usefixtures("on_cuda")
def test_flash_attn_4_without_flash_attn_is_not_taken_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)  # all that its wheel has
    (tmp_path / "flash_attn" / "cute" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    for module in ("flash_attn", "flash_attn.cute", FLASH):
        monkeypatch.delitem(sys.modules, module, raising=False)
    assert find_kernel("auto", CPU, BFLOAT16)[1].startswith("flash-attn is not installed (pip")


@pytest.mark.usefixtures("on_cuda")
@pytest.mark.parametrize(
    ("capability", "versions", "chosen"),
    [
        ((9, 0), (4, 3, 2), "flash-attn-4"),
        ((9, 0), (3, 2), "flash-attn-3"),
        ((9, 0), (2,), "flash-attn"),
        ((10, 0), (4, 3, 2), "flash-attn-4"),
        ((10, 0), (3, 2), "flash-attn"),
        ((8, 0), (4, 3, 2), "flash-attn"),
        ((12, 0), (4, 3), "torch.nn.attention.varlen"),
    ],
)
def test_auto_uses_the_newest_flash_attention_for_the_gpu(
    capability: tuple[int, int],
    versions: Sequence[int],
    chosen: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    by_package = {"flash-attn-4": "4", "flash-attn-3": "3", "flash-attn": "2"}
    installed(by_package, monkeypatch)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    for number in versions:
        module = varlen.LIBRARIES[name := f"flash_attention_{number}"].module
        monkeypatch.setitem(sys.modules, module, package(module, flash_attn(name)))
    kernel, reason = find_kernel("auto", CPU, BFLOAT16, 128)
    assert kernel is not None
    assert kernel.name == f"{chosen} {by_package[chosen]}" if chosen in by_package else chosen
    is_outdated = capability in ((9, 0), (10, 0)) and 4 not in versions
    hint = 'flash-attn-4 is not installed (pip install -e ".[flash]")'
    assert (hint in reason) == is_outdated


@pytest.mark.usefixtures("on_cuda")
def test_the_next_kernel_is_used_if_one_lacks_the_head_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def small_heads(q: torch.Tensor, *states: Any, **settings: Any) -> Any:
        assert q.shape[-1] <= 128, "(head_dim, head_dim_v)=(192, 192) is not supported on SM100"
        return flash_attn("flash_attention_4")(q, *states, **settings)

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (10, 0))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", package("flash_attn.cute", small_heads))
    for size, name in ((128, "flash-attn-4"), (192, "torch.nn.attention.varlen")):
        kernel, reason = find_kernel("auto", CPU, BFLOAT16, size)
        assert kernel is not None
        assert kernel.name == name
        assert ("is not supported on SM100" in reason) == (size == 192)
    assert find_kernel("auto", CPU, BFLOAT16, 512) == (
        None,
        "FlashAttention needs heads of at most 256, not 512",
    )


@pytest.mark.usefixtures("on_cuda")
def test_a_missing_flash_attention_version_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        for number in (3, 4):
            find_kernel(f"flash_attention_{number}", CPU, BFLOAT16)
    for number in (3, 4):
        assert (
            f"attention: using torch.nn.attention.varlen instead of flash_attention_{number}: "
            f"flash-attn-{number} has no kernel for compute capability 8.0." in caplog.text
        )


@pytest.mark.usefixtures("on_cuda")
def test_a_kernel_that_is_wrong_or_does_not_load_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def sees_too_far(*states: Any, **settings: Any) -> torch.Tensor:
        left, right = settings["window_size"]
        return flash_attn_varlen_func(*states, **settings | {"window_size": (left + 1, right)})

    monkeypatch.setitem(sys.modules, FLASH, package(FLASH, sees_too_far))
    with caplog.at_level(logging.WARNING):
        kernel, reason = find_kernel("flash_attention_2", CPU, BFLOAT16)
    assert kernel is not None
    assert kernel.name == "torch.nn.attention.varlen"
    assert "flash-attn is off by" in reason
    assert "torch.nn.attention.varlen instead of flash_attention_2" in caplog.text

    def undefined_symbol(*_: Any, **__: Any) -> None:
        raise RuntimeError("undefined symbol")

    monkeypatch.setitem(sys.modules, FLASH, package(FLASH, undefined_symbol))
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", lambda query: query)
    kernel, reason = find_kernel("auto", CPU, BFLOAT16)
    assert kernel is None
    assert "flash-attn does not run here: undefined symbol" in reason
    assert (
        "torch.nn.attention.varlen does not run here: its varlen_attn does not support sliding "
        "windows yet" in reason
    )


@pytest.mark.usefixtures("on_cuda")
@pytest.mark.parametrize("wrong", ["is left out", "is rejected"])
def test_a_kernel_without_a_score_cap_is_used_for_models_without_one(
    wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_cap(*states: Any, **settings: Any) -> torch.Tensor:
        if settings.pop("softcap", 0.0) and wrong == "is rejected":
            raise TypeError("unexpected keyword argument 'softcap'")
        return flash_attn_varlen_func(*states, **settings)

    monkeypatch.setitem(sys.modules, FLASH, package(FLASH, without_cap))
    kernel, _ = find_kernel("auto", CPU, BFLOAT16, 64, True)
    assert kernel is not None
    assert (kernel.name, kernel.has_softcap) == ("flash-attn 2.8.3", False)


def test_on_a_cpu_attention_logs_only_information(
    tiny_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert find_kernel("auto", CPU, FLOAT32) == (
        None,
        "flash-attn runs on CUDA devices, not on cpu",
    )
    model_attention.log_once.cache_clear()
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            started(ActorWorker, tiny_config(tiny_dir), 1)
    records = [record for record in caplog.records if "attention" in record.message]
    assert [record.levelname for record in records] == ["INFO"]
    assert "packed rows by sdpa, in rectangles" in records[0].message


def test_the_gradients_of_copies_are_sums_in_float32() -> None:
    layout = RowLayout([5] * 300, CPU, shared=[0] + [4] * 299)
    key = torch.zeros(sum(layout.queries), 1, 8, dtype=BFLOAT16, requires_grad=True)
    rows = attention._WholeRows.apply(key, layout)
    (gradient,) = torch.autograd.grad(rows.sum(), key)
    assert gradient[:4].unique().tolist() == [300.0]
    assert gradient[4:].unique().tolist() == [1.0]


@pytest.mark.parametrize(("family", "cap"), [("phi-3", None), ("gemma-2", 2.0)])
def test_a_model_trains_the_same_with_and_without_a_kernel(
    family: str, cap: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(tmp_path, family)
    calls, results = [], []

    def function(*states: Any, **settings: Any) -> torch.Tensor:
        calls.append(settings)
        return flash_attn_varlen_func(*states, **settings)

    flash = VarlenKernel("flash-attn", flash_attn_kernel(function), FLOAT32, has_softcap=True)
    monkeypatch.setattr(build_model, "kernel_blocker", lambda *_: "")
    for kernel in (flash, None):
        monkeypatch.setattr(varlen, "find_kernel", lambda *_, kernel=kernel: (kernel, ""))
        actor = started(ActorWorker, tiny_config(folder, entropy_coeff=0.01), 1)
        assert actor.engine.packs
        log_probs = actor.compute_log_prob(make_batch(6))[0].batch["old_log_probs"]
        results.append((log_probs, gradients(actor, make_batch(6), ACTOR_COLUMNS)))
        description = describe(actor.engine.module, True, kernel, "")
        by_kernel = "packed rows by flash-attn, which reads the bounds of rows"
        assert (by_kernel in description) == (kernel is not None)
        without_cap = describe(actor.engine.module, True, TORCH, "")
        assert ("in rectangles" in without_cap) == (cap is not None)
    (ours, our_gradients), (theirs, their_gradients) = results
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    for name, gradient in their_gradients.items():
        assert (our_gradients[name] - gradient).norm() <= 1e-4 * gradient.norm(), name
    assert (3, 0) in {settings["window_size"] for settings in calls}
    assert {settings.get("softcap") for settings in calls} == {cap}
