"""Files of a checkpoint as copies in host memory, which are written while training goes on.

    copies.begin(folder)
    write_shards(tensors, folder, rank, num_ranks, copies.add)    # copies; the tensors may change
    files = copies.write()                                        # in another thread

The copies lie as the file does, in blocks that the next checkpoint uses again, pinned where the
tensors are on a GPU. Writing is a few calls a block, none of which holds the interpreter's lock.
"""

from __future__ import annotations

import logging
import os
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from verl_like.errors import CheckpointError
from verl_like.process.machine import free_memory_gb
from workers.parallel.collectives import Ranks
from workers.training.shards import WriteFile, bytes_of, pieces_to_write, write_file

BLOCK_BYTES = 16 * 2**20
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
        self._is_dropped = threading.Event()
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
        self._is_dropped.clear()

    def pay(self, ranks: Ranks, tensors: Mapping[str, Tensor]) -> bool:
        """Whether all ranks shall copy these tensors; collective.

        Not if they are small, nor if some rank's host has no room for them.
        """
        pieces = pieces_to_write(tensors, ranks.mine, ranks.count).values()
        num_bytes = sum(piece.values.nbytes for piece in pieces)
        answers = ranks.all_do(lambda: (num_bytes >= self.least_bytes, self._missing(num_bytes)))
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

    def _missing(self, num_bytes: int) -> str:
        """Why the host has no room for so many bytes; "" if it has."""
        wanted = (num_bytes - self._num_allocated) / 2**30
        free = free_memory_gb()
        num_here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        if wanted <= 0 or free is None or wanted * num_here <= MOST_OF_FREE * free:
            return ""
        return f"{wanted:.2f} GiB on each of {num_here} ranks, {free:.2f} GiB are free"

    @property
    def _num_allocated(self) -> int:
        return sum(copy.num_allocated for copy in (*self._files.values(), *self._spare))

    def add(self, path: Path, header: bytes, tensors: Sequence[Tensor]) -> None:
        """Copy a file's contents."""
        copy = self._spare.pop(0) if self._spare else _FileCopy()
        copy.fill(header, tensors)
        self._files[path] = copy

    def write(self) -> Files:
        """Write every file, to the disk; what is written is as it was when it was copied."""
        found = {}
        for path, copy in self._files.items():
            try:
                facts = copy.write(path, self._is_dropped)
            except OSError as error:
                raise CheckpointError(f"{path}: {type(error).__name__}: {error}") from error
            found[path.relative_to(self.folder).as_posix()] = facts
        return found

    def drop(self) -> None:
        """Nobody wants the files any more: a `write` in another thread ends."""
        self._is_dropped.set()


def writer_of(copies: FileCopies | None, ranks: Ranks, tensors: Mapping[str, Tensor]) -> WriteFile:
    """What writes these tensors: at once, or where copies pay, later; collective with copies."""
    pays = copies is not None and copies.pay(ranks, tensors)
    return copies.add if copies is not None and pays else write_file


class _FileCopy:
    """The contents of one file, block after block."""

    def __init__(self) -> None:
        self._blocks: list[Tensor] = []
        self._num_bytes = 0

    @property
    def num_allocated(self) -> int:
        return BLOCK_BYTES * len(self._blocks)

    def fill(self, header: bytes, tensors: Sequence[Tensor]) -> None:
        """Copy all of it; what the tensors become later does not change it."""
        self._num_bytes = 0
        on_gpu = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
        for part in (torch.frombuffer(bytearray(header), dtype=torch.uint8), *tensors):
            self._append(bytes_of(part), pinned=on_gpu is not None)
        if on_gpu is not None:
            torch.cuda.synchronize(on_gpu)

    def _append(self, data: Tensor, pinned: bool) -> None:
        start = 0
        while start < len(data):
            number, offset = divmod(self._num_bytes, BLOCK_BYTES)
            if number == len(self._blocks):
                block = torch.empty(BLOCK_BYTES, dtype=torch.uint8, pin_memory=pinned)
                self._blocks.append(block)
            count = min(len(data) - start, BLOCK_BYTES - offset)
            target = self._blocks[number][offset : offset + count]
            target.copy_(data[start : start + count], non_blocking=True)
            start += count
            self._num_bytes += count

    def write(self, path: Path, is_dropped: threading.Event) -> dict[str, int]:
        """Write the file to the disk; gives its fingerprint."""
        crc, left = 0, self._num_bytes
        with path.open("wb") as file:
            for block in self._blocks:
                if is_dropped.is_set():
                    raise CheckpointError(f"{path} was given up")
                part = memoryview(block.numpy())[:left]
                crc = zlib.crc32(part, crc)
                file.write(part)
                left -= len(part)
            file.flush()
            os.fsync(file.fileno())
        return {"bytes": self._num_bytes, "crc32": crc}
