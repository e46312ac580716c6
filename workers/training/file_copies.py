"""Files of a checkpoint as copies in host memory, which are written while training goes on.

    copies.begin(folder)
    write_shards(tensors, folder, rank, num_ranks, copies)    # copies; the tensors may change
    files = copies.write()                                    # in another thread

The copies lie as the files do, in shared memory that the next checkpoint uses again, page-locked
where the tensors are on a GPU. A process of its own writes them (`workers.training.copy_writer`).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from verl_like.errors import CheckpointError
from verl_like.process.machine import free_memory_gb
from workers.models.tensor_files import AT_ONCE, FileWriter, bytes_of
from workers.parallel.collectives import Ranks
from workers.training.copy_writer import CopyWriter
from workers.training.host_buffer import HostBuffer
from workers.training.shards import pieces_to_write

LEAST_BYTES = 16 * 2**20
"""Below this a rank's file is written sooner than a copy of it would pay."""
MOST_OF_FREE = 0.5
"""The share of the free host memory that the copies of all ranks may take."""
Files = dict[str, dict[str, int]]
"""Name within a role's folder -> bytes and crc32."""
logger = logging.getLogger(__name__)


class FileCopies:
    """The files of one checkpoint of a role, on one rank."""

    def __init__(self, least_bytes: int = LEAST_BYTES) -> None:
        """Nothing is copied yet."""
        self.least_bytes = least_bytes
        self.complete: Callable[[Files], None] | None = None
        """What rank 0 has to do when the files of all ranks are there, if anything."""
        self.folder = Path()
        """Of the role, in the checkpoint."""
        self._files: dict[Path, _FileCopy] = {}
        self._spare: list[_FileCopy] = []
        self._writer = CopyWriter()
        self._has_warned = False

    @property
    def are_there(self) -> bool:
        """Whether there is anything to write."""
        return bool(self._files)

    def begin(self, folder: Path) -> None:
        """Forget what was written; the next files are those of a checkpoint in `folder`."""
        self._spare += self._files.values()
        self._files = {}
        self.folder, self.complete = folder, None
        self._writer.begin()

    def pay(self, ranks: Ranks, count: Callable[[], int]) -> bool:
        """Whether all ranks shall copy what they write; collective. `count` gives this one's bytes.

        Not if that is little, nor if some rank's host has no room for it.
        """
        answers = ranks.all_do(lambda: self._judge(count()))
        is_large = any(large for large, _ in answers)
        missing = [f"rank {rank}: {why}" for rank, (_, why) in enumerate(answers) if why]
        if is_large and missing and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "trainer.async_save: host memory has no room for a copy of the checkpoint (%s): "
                "training waits while it is written.",
                "; ".join(missing),
            )
        return is_large and not missing

    def _judge(self, num_bytes: int) -> tuple[bool, str]:
        """Whether so many bytes are many, and why the host has no room for them; "" if it has."""
        is_large = num_bytes >= self.least_bytes
        wanted = (num_bytes - self._num_allocated) / 2**30
        free = free_memory_gb()
        num_here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        if wanted <= 0 or free is None or wanted * num_here <= MOST_OF_FREE * free:
            return is_large, ""
        return is_large, f"{wanted:.2f} GiB on each of {num_here} ranks, {free:.2f} GiB are free"

    @property
    def _num_allocated(self) -> int:
        return sum(len(copy.buffer.bytes) for copy in (*self._files.values(), *self._spare))

    def add(self, path: Path, header: bytes, tensors: Sequence[Tensor]) -> None:
        """Copy a file's contents."""
        copy = self._spare.pop(0) if self._spare else _FileCopy()
        copy.fill(header, tensors)
        self._files[path] = copy

    def rename(self, path: Path, name: Path) -> None:
        """Write it under another name."""
        self._files[name] = self._files.pop(path)

    def write(self) -> Files:
        """Write every file, to the disk; what is written is as it was when it was copied."""
        found = {}
        for path, copy in self._files.items():
            try:
                facts = self._writer.write(path, copy.buffer, copy.num_bytes)
            except OSError as error:
                raise CheckpointError(f"{path}: {type(error).__name__}: {error}") from error
            found[path.relative_to(self.folder).as_posix()] = facts
        return found

    def hurry(self) -> None:
        """Somebody waits for the files: a `write` in another thread gets all that it can use."""
        self._writer.hurry()

    def drop(self) -> None:
        """Nobody wants the files any more: a `write` in another thread ends."""
        self._writer.drop()


def writer_of(
    copies: FileCopies | None,
    ranks: Ranks,
    tensors: Mapping[str, Tensor],
    more: Callable[[], int] = lambda: 0,
) -> FileWriter:
    """What writes these tensors and `more` bytes: at once, or where copies pay, later.

    Collective with copies.
    """

    def count() -> int:
        pieces = pieces_to_write(tensors, ranks.mine, ranks.count).values()
        return more() + sum(piece.values.nbytes for piece in pieces)

    return copies if copies is not None and copies.pay(ranks, count) else AT_ONCE


class _FileCopy:
    """The contents of one file."""

    def __init__(self) -> None:
        self.buffer = HostBuffer()
        self.num_bytes = 0

    def fill(self, header: bytes, tensors: Sequence[Tensor]) -> None:
        """Copy all of it; what the tensors become later does not change it."""
        on_gpu = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
        self.num_bytes = len(header) + sum(tensor.nbytes for tensor in tensors)
        self.buffer.hold(self.num_bytes, pinned=on_gpu is not None)

        start = 0
        for part in (torch.frombuffer(bytearray(header), dtype=torch.uint8), *tensors):
            data = bytes_of(part)
            self.buffer.bytes[start : start + len(data)].copy_(data, non_blocking=True)
            start += len(data)
        if on_gpu is not None:
            torch.cuda.synchronize(on_gpu)
