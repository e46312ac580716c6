"""A worker on Ray computes on the GPU that Ray has assigned to it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from verl_like.process.info import ProcessInfo

pytestmark = pytest.mark.ray
ON_GPU = ProcessInfo(device_kind="cuda", local_rank=1)


@pytest.mark.parametrize(
    ("assigned", "visible", "facts", "index"),
    [
        (["5"], "5", ON_GPU, 0),
        (["5"], "4,5,6,7", ON_GPU, 1),
        (["GPU-b"], "GPU-a,GPU-b", ON_GPU, 1),
        (["5"], None, ON_GPU, 5),
        (["5"], "0,1", ON_GPU, None),
        ([], "0,1", ON_GPU, None),
        (["5"], "5", ProcessInfo(), None),
    ],
)
def test_the_device_index_counts_visible_devices(
    monkeypatch: pytest.MonkeyPatch,
    assigned: list[str],
    visible: str | None,
    facts: ProcessInfo,
    index: int | None,
) -> None:
    import ray

    from verl_like.backends.ray.transport import _device_index

    context = SimpleNamespace(get_accelerator_ids=lambda: {"GPU": assigned})
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert _device_index(facts) == index
