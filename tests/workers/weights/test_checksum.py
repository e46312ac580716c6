"""Checksums of weights, and hashes of their bytes."""

from __future__ import annotations

import pytest
import torch

from tests.workers.stand_ins import TiedModel
from workers.weights.checksum import Hashing, byte_view, checksum_of, hash_of


def test_a_checksum_depends_on_names_shapes_and_bits_alone() -> None:
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


@pytest.mark.parametrize("num_bytes", [0, 1, 7, 1000, Hashing.CHUNK, 2 * Hashing.CHUNK + 5])
def test_bytes_hashed_as_they_are_copied_have_the_hash_of_the_whole(num_bytes: int) -> None:
    source = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)
    target, hashing = torch.zeros_like(source), Hashing()
    value = hashing.of_copied(target, source)
    assert torch.equal(target, source)
    assert value == hashing.of(source) == hash_of(source.clone())
    assert hashing.seconds > 0 or not num_bytes


def test_a_flipped_bit_or_two_values_that_changed_places_change_the_hash() -> None:
    source = torch.arange(5000, dtype=torch.float32)
    swapped, flipped = source.clone(), source.clone()
    swapped[[7, 4000]] = source[[4000, 7]]
    byte_view(flipped)[17_001] ^= 64
    assert len({hash_of(byte_view(tensor)) for tensor in (source, swapped, flipped)}) == 3
