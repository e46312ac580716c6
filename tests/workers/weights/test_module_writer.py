"""Writing weights into a module, and its errors."""

from __future__ import annotations

import pytest
import torch

from tests.workers.stand_ins import TiedModel
from verl_like.errors import WeightSyncError
from workers.weights.full_weights import ModuleWriter


def test_tied_weights_are_accepted_under_either_name() -> None:
    source, target = TiedModel(0), TiedModel(1)
    writer = ModuleWriter(target)
    for name, tensor in source.named_parameters():
        writer.write_tensor("head.weight" if name == "embed.weight" else name, tensor)
    writer.verify("writer")
    assert torch.equal(target.embed.weight, source.embed.weight)


def test_only_dtypes_that_lose_no_bit_are_accepted() -> None:
    source = TiedModel(0)
    writer = ModuleWriter(TiedModel(1))
    for name, tensor in source.named_parameters():
        writer.write_tensor(name, tensor.float())
    writer.verify("writer")
    writer.write_tensor("small", torch.full((3,), 0.1))
    with pytest.raises(WeightSyncError, match="1 that lost bits: small"):
        writer.verify("writer")
