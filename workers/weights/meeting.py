"""How the ranks of one sync of weights meet in its store, and the groups that they form there."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from verl_like.errors import WeightSyncError
from verl_like.process.store import SignedStore
from workers.weights.address import FORM_TIMEOUT, LOOPBACK
from workers.weights.sides import InAThread

G = TypeVar("G")

TRANSFER_TIMEOUT = timedelta(seconds=120)
"""How long one broadcast may take, the gathering of its tensors included."""
LOOK_S = 0.5
"""How often a rank that forms its group looks whether the sync is given up."""
GIVEN_UP = "given up"
"""In the place of what a rank says of itself: nobody is to wait for it."""


def gpu_of(device: torch.device) -> str:
    """A name that no other GPU has; none on a CPU, or without nccl."""
    if device.type != "cuda" or not dist.is_nccl_available():
        return ""
    return f"{socket.gethostname()}/{torch.cuda.get_device_properties(device).uuid}"


def group_of_gpus(store: dist.Store, rank: int, size: int) -> Any:
    """The group that buckets travel over where every rank has a GPU of its own, as nccl demands."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = TRANSFER_TIMEOUT
    return dist.ProcessGroupNCCL(store, rank, size, options)


def gloo_options(host: str) -> Any:
    """Of a group that meets at this host: on loopback it stays there.

    Elsewhere gloo takes the interface that GLOO_SOCKET_IFNAME names, or that of the host's name.
    """
    options = dist.ProcessGroupGloo._Options()
    options._timeout = FORM_TIMEOUT
    gloo = dist.ProcessGroupGloo
    stays = host == LOOPBACK
    options._devices = [
        gloo.create_device(hostname=host) if stays else gloo.create_default_device()
    ]
    return options


def meet(store: SignedStore, rank: int, num_receivers: int, gpu: str) -> bool:
    """Wait until every rank is there; returns whether each has a GPU of its own.

    The error names the ranks that did not come.
    """
    with explained("cannot reach the sender's store"):
        store.set(f"joined/{rank}", gpu or "no GPU")
    if rank != 0:
        with explained("the sender is gone"), _naming_absent(store, num_receivers):
            store.wait(["complete"], FORM_TIMEOUT)
            answer = store.get("complete").decode()
        _refuse_given_up([answer])
        return answer == "own GPUs"

    keys = [f"joined/{other}" for other in range(1, num_receivers + 1)]
    with explained("who has come is not known"), _naming_absent(store, num_receivers):
        store.wait(keys, FORM_TIMEOUT)
        gpus = [gpu, *(store.get(key).decode() for key in keys)]
    _refuse_given_up(gpus)
    has_own_gpus = bool(gpu) and "no GPU" not in gpus and len(set(gpus)) == len(gpus)
    store.set("complete", "own GPUs" if has_own_gpus else "yes")
    return has_own_gpus


def give_up(store: SignedStore, num_receivers: int) -> None:
    """Have whoever waits in `meet` go: a rank has failed, and will not come."""
    for rank in range(1, num_receivers + 1):
        if not store.check([f"joined/{rank}"]):
            store.set(f"joined/{rank}", GIVEN_UP)
    store.set("complete", GIVEN_UP)


def formed(form: Callable[[], G], store: SignedStore) -> G:
    """The group that `form` makes: it waits for ranks that have met and may have died since.

    Gloo does so for 20 s, on one connection five times as long, and cannot be told to stop. It is
    left alone once the sync is given up.
    """
    forming = InAThread("forming its group", form)
    while not forming.is_done(LOOK_S):
        with explained("the sender is gone"):
            answer = store.over_another_connection().get("complete").decode()
        _refuse_given_up([answer])
    group: G = forming.get()
    return group


def _refuse_given_up(answers: Iterable[str]) -> None:
    if GIVEN_UP in answers:
        raise WeightSyncError("weight sync: it is given up, since another rank has failed.")


@contextmanager
def _naming_absent(store: SignedStore, num_receivers: int) -> Iterator[None]:
    """A wait in the store that ends in vain is an error about the ranks that did not come."""
    try:
        yield
    except dist.DistStoreError as error:
        ranks = range(num_receivers + 1)
        absent = ", ".join(_who(rank) for rank in ranks if not _has_come(store, rank))
        raise WeightSyncError(
            f"weight sync: waited {FORM_TIMEOUT.total_seconds():.0f} s for {absent or _who(0)}: "
            "not there. Is that worker alive, and not busy with another call?"
        ) from error


def _has_come(store: SignedStore, rank: int) -> bool:
    key = f"joined/{rank}"
    return store.check([key]) and store.get(key) != GIVEN_UP.encode()


def _who(rank: int) -> str:
    return f"rollout rank {rank - 1}" if rank else "the sender (actor rank 0)"


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Errors of torch's transport as `WeightSyncError`s that say what we were doing."""
    try:
        yield
    except WeightSyncError:
        raise
    except (RuntimeError, dist.DistError) as error:
        raise WeightSyncError(f"weight sync: {what}: {str(error).splitlines()[0]}") from error
