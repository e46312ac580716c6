"""Checksums of weights, and hashes of their bytes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.workers.stand_ins import TiedModel
from workers.weights.checksum import (
    CopyCheck,
    Fingerprint,
    Hashing,
    Seen,
    byte_view,
    checksum_of,
    hash_of,
    hash_on_device,
    noted,
)


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
    value = hashing.of_copied(target.numpy(), source.numpy())
    assert torch.equal(target, source)
    assert value == hashing.of(source) == hash_of(source.clone())
    assert hashing.seconds > 0 or not num_bytes


def test_a_flipped_bit_or_two_values_that_changed_places_change_the_hash() -> None:
    source = torch.arange(5000, dtype=torch.float32)
    swapped, flipped = source.clone(), source.clone()
    swapped[[7, 4000]] = source[[4000, 7]]
    byte_view(flipped)[17_001] ^= 64
    assert len({hash_of(byte_view(tensor)) for tensor in (source, swapped, flipped)}) == 3


def test_a_copy_is_checked_for_every_bit_that_its_engine_holds() -> None:
    weights = {"a": torch.randn(5, 3), "b": torch.randn(7).bfloat16(), "c": torch.zeros(0)}
    check = CopyCheck()
    held = {name: tensor.clone() for name, tensor in noted(weights.items(), check, Fingerprint())}
    held["b"] = held["b"].float()  # no bit of it is lost
    assert check.damaged(held.items()) == []
    held["a"].view(torch.int32)[4, 2] ^= 1
    held["b"][3] = torch.nextafter(held["b"][3], torch.tensor(9.0)) * 1.01
    assert check.damaged(held.items()) == ["a", "b"]
    assert check.seconds > 0


def test_a_hash_that_is_known_is_compared_with_and_not_taken_again() -> None:
    weights = {"a": torch.randn(5, 3), "b": torch.randn(7), "c": torch.randn(2)}
    seen: dict[str, Seen] = {}

    def arriving() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights.items():
            if name != "c":
                seen[name] = hash_of(byte_view(tensor)) + (name == "b"), None
            yield name, tensor

    check = CopyCheck()
    held = dict(noted(arriving(), check, Fingerprint(), seen))
    assert check.damaged(held.items()) == ["b"]


def test_a_fingerprint_is_of_values_whatever_holds_them() -> None:
    values = torch.randn(9, 15).bfloat16()
    forms = [values, values.float(), torch.nn.Parameter(values.float()), values.float().t().t()]
    assert len({fingerprint_of(form) for form in forms}) == 1
    strided = torch.zeros(9, 30)[:, ::2].copy_(values)
    assert fingerprint_of(strided) == fingerprint_of(values)
    assert fingerprint_of(values.t()) != fingerprint_of(values) != fingerprint_of(values.flatten())


@pytest.mark.parametrize("sizes", [[(5, 3), (130,), (0,), (64,), ()], [(400, 400), (3,), (2, 7)]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_seen_of_tensors_in_a_row_is_what_each_of_them_is(
    sizes: list[tuple[int, ...]], dtype: torch.dtype
) -> None:
    odd = torch.arange(3, dtype=torch.bfloat16)
    for first in ([], [odd]):  # after an odd one, no float32 begins where one may
        tensors = [*first, *(torch.randn(size).to(dtype) for size in sizes)]
        payload = torch.cat([byte_view(tensor) for tensor in tensors])
        pieces = [(tensor.nbytes, tensor.dtype) for tensor in tensors]
        hashing, alone, together = Hashing(), Fingerprint(), Fingerprint()
        seen = list(hashing.of_pieces(payload, pieces))
        assert [value for value, _ in seen] == [hash_of(byte_view(tensor)) for tensor in tensors]
        for number, (tensor, (_, values)) in enumerate(zip(tensors, seen, strict=True)):
            alone.note(f"{number}", tensor)
            together.note(f"{number}", tensor, values)
            assert (values is not None) == (tensor.dtype is torch.float32 and not first)
        assert together.value() == alone.value()
        assert hashing.seconds > 0


def fingerprint_of(tensor: torch.Tensor) -> int:
    fingerprint = Fingerprint()
    fingerprint.note("a", tensor)
    return fingerprint.value()


def test_the_hash_of_a_gpus_weights_changes_with_a_bit_and_with_a_place() -> None:
    payload = torch.randint(0, 256, (1000,), dtype=torch.uint8)
    payload[:2] = torch.tensor([1, 2], dtype=torch.uint8)
    value = hash_on_device(payload, chunk=64)
    assert hash_on_device(payload) == value
    others = [payload.clone() for _ in range(3)]
    others[0][999] ^= 1
    others[1][500] ^= 128
    others[2][[0, 1]] = others[2][[1, 0]]
    assert value not in [hash_on_device(other) for other in others]
