"""A tiny model with random weights, its tokenizer, and environment hosts for all tests here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from trainer.cli.make_tiny import make_model, make_tokenizer
from workers.agents.host import EnvironmentHost
from workers.agents.load_environment import EnvironmentSpec


@pytest.fixture(scope="package")
def tokenizer() -> Any:
    return make_tokenizer()


@pytest.fixture(scope="package")
def model(tokenizer: Any) -> Any:
    return make_model(tokenizer)


@pytest.fixture(scope="package")
def host_of() -> Iterator[Callable[[EnvironmentSpec, float], EnvironmentHost]]:
    """Return a function that starts a host, or returns the one with the same settings."""
    hosts: dict[str, EnvironmentHost] = {}

    def get(spec: EnvironmentSpec, step_timeout_s: float) -> EnvironmentHost:
        key = f"{spec} {step_timeout_s}"
        if key not in hosts:
            hosts[key] = EnvironmentHost(spec, step_timeout_s)
        return hosts[key]

    yield get
    for host in hosts.values():
        host.close()
