"""Tensors in files by rank: each element is written once, read back, and checked."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader, load
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from tests.workers.kept_ranks import run_kept
from verl_like.errors import CheckpointError, DamagedCheckpointError
from workers.models.tensor_files import DTYPES
from workers.training.checkpoints.shards import PLACES, read_shards, write_shards


def of_every_type() -> dict[str, Tensor]:
    numbers = torch.arange(-3, 9)
    return {f"t.{name}": numbers.to(dtype).reshape(4, 3) for dtype, name in DTYPES.items()} | {
        "scalar": torch.tensor(7.5),
        "of no elements": torch.zeros(0, 3),
        "transposed": torch.arange(6.0).reshape(2, 3).T,
    }


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_whole_tensors_are_written_once_and_read_back(tmp_path: Path, num_ranks: int) -> None:
    tensors = of_every_type()
    for rank in range(num_ranks):
        write_shards(tensors, tmp_path, rank, range(num_ranks))
    loaded = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    read_shards(loaded, tmp_path)
    assert all(loaded[name].equal(tensor) for name, tensor in tensors.items())

    stored = [load_file(tmp_path / f"{rank}.safetensors") for rank in range(num_ranks)]
    names = [name for of_rank in stored for name in of_rank]
    assert sorted(names) == sorted(tensors.keys() - {"of no elements"})
    sizes = [sum(tensor.nbytes for tensor in of_rank.values()) for of_rank in stored]
    assert max(sizes) - min(sizes) <= max(tensor.nbytes for tensor in tensors.values())


def sharded(rows: Tensor, rank: int, replicas: int) -> DTensor:
    """Return the tensor of a rank of four, with rows sharded under `replicas` replicas."""
    dist.init_process_group("fake", rank=rank, world_size=4)
    mesh = init_device_mesh("cpu", (replicas, 4 // replicas), mesh_dim_names=("replicate", "shard"))
    local = rows.tensor_split(4 // replicas)[rank % (4 // replicas)]
    return DTensor.from_local(
        local,
        mesh,
        [Replicate(), Shard(0)],
        shape=rows.shape,
        stride=rows.stride(),
        run_check=False,
    )


@pytest.mark.parametrize("replicas", [1, 2])
def test_replicated_shards_are_written_once_and_read_by_any_number(
    tmp_path: Path, replicas: int
) -> None:
    run_kept(1, write_and_read, tmp_path, replicas)  # a process without a group of its local


def write_and_read(tmp_path: Path, replicas: int) -> None:
    """Do what four ranks would, one after the other."""
    import torch.testing._internal.distributed.fake_pg  # noqa: F401 - makes the backend known

    rows = torch.arange(24.0).reshape(8, 3)
    for rank in range(4):
        try:
            write_shards({"rows": sharded(rows, rank, replicas)}, tmp_path, rank, range(4))
        finally:
            dist.destroy_process_group()
    files = [load_file(path) for path in sorted(tmp_path.iterdir())]
    assert [sorted(file) for file in files].count(["rows"]) == 4 // replicas

    whole = torch.zeros_like(rows)
    read_shards({"rows": whole}, tmp_path)
    assert whole.equal(rows)
    try:
        shard = sharded(torch.zeros_like(rows), 1, 2 // replicas)
        read_shards({"rows": shard}, tmp_path)
        assert shard.to_local().equal(rows.tensor_split(2 * replicas)[1])
    finally:
        dist.destroy_process_group()


def test_packed_weights_are_two_chunks_per_rank_that_torch_can_read(
    tmp_path: Path,
) -> None:
    run_kept(1, write_packed, tmp_path)  # a process without a group of its local


def write_packed(tmp_path: Path) -> None:
    """Write rows of two weights end to end, each split over two ranks."""
    import torch.testing._internal.distributed.fake_pg  # noqa: F401 - makes the backend known

    rows, packed = torch.arange(24.0).reshape(8, 3), _StridedShard(0, split_factor=2)
    for rank in range(2):
        dist.init_process_group("fake", rank=rank, world_size=2)
        try:
            mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
            local = torch.cat([half.chunk(2)[rank] for half in rows.chunk(2)])
            size = {"shape": rows.shape, "stride": rows.stride()}
            tensor = DTensor.from_local(local, mesh, [packed], run_check=False, **size)
            write_shards({"rows": tensor}, tmp_path, rank, range(2))
            if rank == 1:
                loaded = DTensor.from_local(local * 0, mesh, [packed], run_check=False, **size)
                read_shards({"rows": loaded}, tmp_path)
                assert loaded.to_local().equal(local)
        finally:
            dist.destroy_process_group()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "0-1.safetensors",
        "0.safetensors",
        "1-1.safetensors",
        "1.safetensors",
    ]
    whole = {"rows": torch.zeros_like(rows)}
    load(whole, storage_reader=HuggingFaceStorageReader(str(tmp_path)), no_dist=True)
    assert whole["rows"].equal(rows)


def write_half(folder: Path, rank: int, places: str | None = None) -> None:
    """Write half of a tensor of four rows."""
    if places is None:
        places = json.dumps({"w": {"saved_offsets": [2 * rank, 0]}})
    save_file({"w": torch.ones(2, 2)}, folder / f"{rank}.safetensors", metadata={PLACES: places})


def with_places(text: str) -> Callable[[Path], None]:
    return lambda folder: write_half(folder, 0, text)


def at(*offsets: Any) -> Callable[[Path], None]:
    return with_places(json.dumps({"w": {"saved_offsets": offsets}}))


def cut(folder: Path) -> None:
    path = folder / "0.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def twice(folder: Path) -> None:
    (folder / "2.safetensors").write_bytes((folder / "0.safetensors").read_bytes())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (cut, "0.safetensors is damaged"),
        (twice, "lacks or repeats elements in 1 of its tensors, such as w"),
        (lambda folder: (folder / "1.safetensors").unlink(), "lacks or repeats elements"),
        (
            lambda folder: [path.unlink() for path in folder.iterdir()],
            "has no file <rank>.safetensors",
        ),
        (lambda folder: (folder / "0.safetensors").write_bytes(b""), "is damaged"),
        (
            lambda folder: save_file({"w": torch.ones(1)}, folder / "0.safetensors"),
            "is not a shard",
        ),
        (with_places("{"), "is damaged"),
        (with_places("[" * 100_000), "is damaged"),
        (with_places(json.dumps({"w": 3})), "is damaged"),
        (at(3, 0), "lacks or repeats elements"),
        (at("a", {}), "is damaged"),
        (at(0), "lacks or repeats elements"),
    ],
)
def test_files_without_the_tensors_are_rejected(
    tmp_path: Path, change: Callable[[Path], None], message: str
) -> None:
    write_half(tmp_path, 0)
    write_half(tmp_path, 1)
    change(tmp_path)
    with pytest.raises(DamagedCheckpointError, match=message):
        read_shards({"w": torch.zeros(4, 2)}, tmp_path)


def test_torch_can_read_the_files(tmp_path: Path) -> None:
    tensors = {"w": torch.arange(6.0).reshape(2, 3), "step": torch.tensor(3.0)}
    write_shards(tensors, tmp_path, 0, range(1))
    loaded = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    load(loaded, storage_reader=HuggingFaceStorageReader(str(tmp_path)), no_dist=True)
    assert all(loaded[name].equal(tensor) for name, tensor in tensors.items())


def test_a_dtype_that_the_format_lacks_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match="w is torch.complex64, which a tensor file cannot store"
    ):
        write_shards({"w": torch.zeros(1, dtype=torch.complex64)}, tmp_path, 0, range(1))
