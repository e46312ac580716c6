"""Encode the numbers of a tensor that differ from the receiver's version.

After an update with a small learning rate, most bfloat16 weights round to the number that they had.
Only the others are sent: how many there are in each block of 256 numbers (2 bytes), their positions
in the block (1 byte each), and their new bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workers.weights.checksum import byte_view, words_of

BLOCK = 256
PREFIX = "changes:"
"""Precedes the tensor's name if only its changes are sent."""


def encode_changes(old: Tensor, new: Tensor) -> Tensor | None:
    """Return the changed numbers as bytes; None if they are not shorter than `new`."""
    words = words_of(new)
    places = (words_of(old) != words).nonzero().squeeze(1)
    num_blocks = -(-len(words) // BLOCK)
    if 2 * num_blocks + len(places) * (1 + new.itemsize) >= new.nbytes:
        return None
    counts = torch.bincount(places // BLOCK, minlength=num_blocks).to(torch.int16)
    offsets = (places % BLOCK).to(torch.uint8)
    return torch.cat([byte_view(counts), offsets, byte_view(words[places])])


def apply_changes(tensor: Tensor, changes: Tensor) -> None:
    """Write the changes that `encode_changes` returned into the old tensor."""
    words = words_of(tensor)
    num_blocks = -(-len(words) // BLOCK)
    counts = changes[: 2 * num_blocks].clone().view(torch.int16).long()
    total = int(counts.sum())
    offsets, values = changes[2 * num_blocks :].split([total, total * words.itemsize])
    starts = torch.repeat_interleave(torch.arange(0, num_blocks * BLOCK, BLOCK), counts)
    words[starts + offsets] = values.clone().view(words.dtype)
