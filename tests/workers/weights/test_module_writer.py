"""Writing weights into a module, and its errors."""

from __future__ import annotations

import pytest
import torch

from tests.workers.stand_ins import TiedModel
from verl_like.errors import WeightSyncError
from workers.weights.module_writer import ModuleWriter


def test_tied_weights_arrive_under_either_name() -> None:
    source, target = TiedModel(0), TiedModel(1)
    writer = ModuleWriter(target)
    for name, tensor in source.named_parameters():
        writer.write_tensor("head.weight" if name == "embed.weight" else name, tensor)
    writer.verify("writer")
    assert torch.equal(target.embed.weight, source.embed.weight)


def test_a_dtype_that_loses_no_bit_is_taken_and_one_that_does_is_refused() -> None:
    source = TiedModel(0)
    writer = ModuleWriter(TiedModel(1))
    for name, tensor in source.named_parameters():
        writer.write_tensor(name, tensor.float())
    writer.verify("writer")
    writer.write_tensor("small", torch.full((3,), 0.1))
    with pytest.raises(WeightSyncError, match="1 that lost bits: small"):
        writer.verify("writer")
