"""Tensors of all ranks in one folder: torch's distributed checkpoint in safetensors.

    <folder>/<rank>.safetensors      shards by name; the header has the offset of each
    <folder>/<rank>-1.safetensors    second shards, of packed weights under tensor parallelism

If several ranks have the same shard of a tensor, one of them writes it. A folder can be read by any
number of ranks, and by `torch.distributed.checkpoint.HuggingFaceStorageReader` anywhere. Nothing is
pickled, so reading the folder never runs code. `Ranks` runs file work on all ranks together: an
error on one rank is raised on all.

torch's writer is not used: it keeps a rank's file twice in host memory (three times in the
background), takes five times the CPU time, and has the same priority as the training steps.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor

from verl_like.errors import CheckpointError, DamagedCheckpointError
from workers.models.state import local_shard
from workers.models.tensor_files import WRITE_NOW, FileWriter, write_tensors
from workers.parallel.placements import ShardSlice, is_first_replica, shard_slices
from workers.training.checkpoints.coverage import Shards, check_coverage, is_partition

CAUGHT = (OSError, RuntimeError, ValueError, LookupError, TypeError, SafetensorError)
"""Errors that reading and writing files of tensors may raise."""


class Ranks:
    """The ranks of a process group (None: only this rank).

    An error of `CAUGHT` on any rank is raised on all ranks, as a `CheckpointError` that begins with
    `subject`.
    """

    def __init__(self, group: dist.ProcessGroup | None, subject: str) -> None:
        self.group = group
        self.subject = subject
        self.mine = 0 if group is None else group.rank()
        self.count = 1 if group is None else group.size()

    def run_on_all(self, work: Callable[[], Any]) -> list[Any]:
        """Run `work` on every rank; return the results in rank order."""
        result: Any = None
        problem: tuple[str, bool] | None = None
        try:
            result = work()
        except CAUGHT as error:
            name = "" if isinstance(error, CheckpointError) else f"{type(error).__name__}: "
            first_line = str(error).splitlines()[0] if str(error) else ""
            text = f"rank {self.mine}: {name}{first_line}".rstrip(".")
            problem = text, isinstance(error, DamagedCheckpointError)

        outcomes: list[Any] = [(result, problem)]
        if self.group is not None:
            outcomes *= self.count
            try:
                dist.all_gather_object(outcomes, (result, problem), group=self.group)
            except (RuntimeError, dist.DistError) as error:
                raise CheckpointError(
                    f"{self.subject}: rank {self.mine} lost another rank: {error}"
                ) from error
        problems = [problem for _, problem in outcomes if problem is not None]
        if problems:
            is_damage = any(damaged for _, damaged in problems)
            kind = DamagedCheckpointError if is_damage else CheckpointError
            raise kind(f"{self.subject}: {'; '.join(text for text, _ in problems)}.")
        return [result for result, _ in outcomes]

    def run_on_first(self, work: Callable[[], None]) -> None:
        """Run `work` on rank 0; every rank must call this."""
        self.run_on_all(work if self.mine == 0 else lambda: None)

    def share_files(
        self, folder: Path, fact: Callable[[Path], Any], names: list[str] | None = None
    ) -> dict[str, Any]:
        """Return `fact` of every file under `folder` (or of `names`), each computed by one rank."""
        if names is None:
            files = [path for path in folder.rglob("*") if path.is_file()]
            names = sorted(path.relative_to(folder).as_posix() for path in files)

        mine = names[self.mine :: self.count]
        merged: dict[str, Any] = {}
        for results in self.run_on_all(lambda: {name: fact(folder / name) for name in mine}):
            merged |= results
        return merged


def write_on_all(
    ranks: Ranks,
    tensors: Mapping[str, Tensor],
    folder: Path,
    stage: range,
    writer: FileWriter = WRITE_NOW,
) -> None:
    """Write the shards of all ranks, and prove that they are each tensor once; collective.

    `stage` are the ranks that call this with the same tensors as this rank.
    """
    shards = ranks.run_on_all(lambda: write_shards(tensors, folder, ranks.mine, stage, writer))
    check_coverage(shards, ranks.subject)


METADATA = {"format": "pt", "DCP_VERSION": "1.0"}
PLACES = "DCP_SHARDING_INFO"
"""torch's key for the offsets in a file's header."""


def write_shards(
    tensors: Mapping[str, Tensor],
    folder: Path,
    rank: int,
    ranks: range,
    writer: FileWriter = WRITE_NOW,
) -> Shards:
    """Write this rank's file, or files; return its shards, for `check_coverage`.

    All `ranks` call this with the same names in the same order. Together they write every element
    once.
    """
    folder.mkdir(parents=True, exist_ok=True)
    bytes_of = [0] * len(ranks)
    shards: Shards = {}
    files: list[dict[str, tuple[ShardSlice, Tensor]]] = [{}]
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            is_mine = is_first_replica(tensor, ranks)
        else:
            writer_index = bytes_of.index(min(bytes_of))
            bytes_of[writer_index] += tensor.nbytes
            is_mine = ranks[writer_index] == rank
        if not tensor.numel():
            continue
        shards[name] = tuple(tensor.shape), []
        if not is_mine:
            continue
        local = local_shard(tensor)
        for number, shard_slice in enumerate(shard_slices(tensor)):
            files += [{}] if number == len(files) else []
            files[number][name] = shard_slice, local[shard_slice.local]
            shards[name][1].append(tuple((along.start, along.stop) for along in shard_slice.place))

    for number, contents in enumerate(files):
        places = {
            name: {"saved_offsets": [along.start for along in shard_slice.place]}
            for name, (shard_slice, _) in contents.items()
        }
        header = METADATA | {PLACES: json.dumps(places)}
        path = folder / f"{rank}{f'-{number}' if number else ''}.safetensors"
        write_tensors({name: shard for name, (_, shard) in contents.items()}, path, header, writer)
    return shards


DAMAGE = (
    *(SafetensorError, LookupError, TypeError, ValueError, AttributeError),
    *(RuntimeError, RecursionError),
)
"""Errors of torch's reader for a file, or a JSON header, that was changed after it was written."""


def stored_tensors(folder: Path) -> dict[str, Any]:
    """Return `size`, `properties.dtype` and `chunks` of every tensor in a folder of shards."""
    from torch.distributed.checkpoint import (  # type: ignore[attr-defined]
        HuggingFaceStorageReader,
    )

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        there = ", ".join(sorted(path.name for path in folder.glob("*"))[:5]) or "no files"
        raise DamagedCheckpointError(f"{folder} has no file <rank>.safetensors; it has {there}")
    for path in files:
        try:
            with safe_open(path, framework="pt") as opened:
                header = opened.metadata() or {}
        except SafetensorError as error:
            raise DamagedCheckpointError(f"{path} is damaged: {error}") from error
        if PLACES not in header:
            raise DamagedCheckpointError(
                f"{path} is not a shard of a checkpoint: its header is {header!r:.80}"
            )
    try:
        metadata = HuggingFaceStorageReader(str(folder)).read_metadata()
        tensors: dict[str, Any] = dict(metadata.state_dict_metadata)
        broken = [name for name, tensor in tensors.items() if not _is_covered(tensor.size, tensor)]
    except DAMAGE as error:
        raise _damaged(folder, error) from error
    _reject_broken(folder, broken)
    return tensors


def _damaged(folder: Path, error: BaseException) -> DamagedCheckpointError:
    return DamagedCheckpointError(f"{folder} is damaged: {type(error).__name__} {error!s:.80}")


def read_shards(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Read this rank's shard of every tensor in place; other tensors in the folder are not read."""
    nonempty = {name: tensor for name, tensor in tensors.items() if tensor.numel()}
    stored = stored_tensors(folder)
    missing = [name for name in nonempty if not _is_covered(nonempty[name].shape, stored.get(name))]
    _reject_broken(folder, missing)
    try:
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as opened:
                places = json.loads(opened.metadata()[PLACES])
                for name in nonempty.keys() & {*opened.keys()}:
                    tensor, in_file = nonempty[name], opened.get_slice(name)
                    if not tensor.dim():
                        local_shard(tensor).copy_(opened.get_tensor(name))
                        continue
                    there = ShardSlice.at(places[name]["saved_offsets"], in_file.get_shape())
                    for shard_slice in shard_slices(tensor):
                        if shared := shard_slice.overlap_with(there):
                            here, of_file = shared
                            local_shard(tensor)[here].copy_(in_file[of_file])
    except DAMAGE as error:
        raise _damaged(folder, error) from error


def _reject_broken(folder: Path, names: Sequence[str]) -> None:
    if names:
        raise DamagedCheckpointError(
            f"{folder} lacks or repeats elements in {len(names)} of its tensors, such as {names[0]}"
        )


def _is_covered(shape: tuple[int, ...], stored: Any) -> bool:
    """True if the stored shards cover each element of a tensor of this shape once."""
    if stored is None or tuple(stored.size) != tuple(shape):
        return False
    boxes = []
    for chunk in stored.chunks:
        places = zip(chunk.offsets, chunk.sizes, strict=False)
        boxes.append(tuple((begin, begin + size) for begin, size in places))
    return is_partition(boxes, shape)
