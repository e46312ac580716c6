"""Checksums of weights, and hashes of their bytes."""

from __future__ import annotations

import pytest
import torch

from tests.workers.stand_ins import TiedModel
from workers.models.tensor_files import byte_view
from workers.weights.full_weights import (
    CHUNK,
    DEVICE_CHUNK,
    checksum_of,
    copy_hashed,
    hash_of,
    hash_on_device,
)


def test_a_checksum_depends_only_on_names_shapes_and_bits() -> None:
    tensors = dict(TiedModel(0).named_parameters())
    checksum = checksum_of(tensors.items())
    assert checksum == checksum_of(reversed(tensors.items()))
    assert checksum == checksum_of((name, tensor.float()) for name, tensor in tensors.items())
    assert checksum != checksum_of(
        (name.replace("small", "Small"), tensor) for name, tensor in tensors.items()
    )
    assert checksum != checksum_of((name, tensor.flatten()) for name, tensor in tensors.items())
    byte_view(tensors["layer.weight"])[3] ^= 1
    assert checksum != checksum_of(tensors.items())


@pytest.mark.parametrize("num_bytes", [0, 1, 7, 1000, CHUNK, 2 * CHUNK + 5])
def test_bytes_that_are_hashed_in_a_copy_have_the_usual_hash(num_bytes: int) -> None:
    source = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)
    target = torch.zeros_like(source)
    value = copy_hashed(target, source)
    assert torch.equal(target, source)
    assert value == hash_of(source.clone())


def test_a_flipped_bit_or_two_swapped_values_change_the_hash() -> None:
    source = torch.arange(5000, dtype=torch.float32)
    swapped, flipped = source.clone(), source.clone()
    swapped[[7, 4000]] = source[[4000, 7]]
    byte_view(flipped)[17_001] ^= 64
    assert len({hash_of(byte_view(tensor)) for tensor in (source, swapped, flipped)}) == 3


@pytest.mark.parametrize("num_bytes", [1000, 4 * DEVICE_CHUNK + 1003, 36 * DEVICE_CHUNK + 8])
def test_the_hash_on_a_device_changes_with_a_bit_or_a_position(num_bytes: int) -> None:
    payload = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)
    payload[:8] = torch.arange(8)
    value = int(hash_on_device(payload))
    assert int(hash_on_device(torch.cat([payload[:3], payload])[3:])) == value, "at any address"
    others = [payload.clone() for _ in range(5)]
    others[0][num_bytes - 1] ^= 1
    others[1][500] ^= 128
    others[2][:4], others[2][4:8] = payload[4:8], payload[:4]
    others[3][[3, 7]] ^= 128  # the highest bits of two words
    others[4] = torch.cat([payload, payload.new_zeros(1)])
    assert len({value, *(int(hash_on_device(other)) for other in others)}) == 6
