"""Both backends with workers in separate processes, which a test can kill."""

from __future__ import annotations

import pytest

from trainer.async_training.config import AsyncConfig
from trainer.config.schema import RunConfig

BACKENDS = {
    "local": ("trainer.backend=local",),
    "ray": ("trainer.backend=ray", "cpus_per_process=0.25"),
}
"""Backend -> its settings."""


def start_processes(
    backend: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Let the next run of this test start workers as children, or in the shared Ray session."""
    if backend == "ray":
        request.getfixturevalue("ray_session")
        return
    pools = property(lambda self: frozenset(self.resource_pool_spec))
    for config in (RunConfig, AsyncConfig):
        monkeypatch.setattr(config, "child_pools", pools)
