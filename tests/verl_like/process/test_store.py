"""A store listens at one address, and only holders of the secret can change its keys."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
import torch.distributed as dist

from tests.sockets import listeners
from verl_like.errors import WorkerError
from verl_like.process.info import new_secret
from verl_like.process.store import SIGNATURE_BYTES, SignedStore, open_store

SHORT = timedelta(milliseconds=50)


@pytest.fixture
def server() -> dist.TCPStore:
    return open_store("127.0.0.1")


@pytest.mark.linux
def test_a_store_listens_only_at_its_address(server: dist.TCPStore) -> None:
    ports = {port: address for address, port, _ in listeners([os.getpid()])}
    assert ports[server.port] == "127.0.0.1"


def test_holders_of_the_secret_read_each_others_values(server: dist.TCPStore) -> None:
    secret = new_secret()
    ours, theirs = SignedStore(server, secret, "a"), SignedStore(server, secret, "a")
    ours.set("text", "here")
    ours.set("bytes", b"\0\xff")
    theirs.wait(["text", "bytes"], SHORT)
    assert theirs.check(["text", "bytes"])
    assert not theirs.check(["text", "absent"])
    assert theirs.get("text") == b"here"
    assert theirs.get("bytes") == b"\0\xff"


@pytest.mark.parametrize("other", ["another secret", "another part", "no secret"])
def test_values_written_by_others_do_not_exist(server: dist.TCPStore, other: str) -> None:
    secret = new_secret()
    stranger = {
        "another secret": SignedStore(server, new_secret(), "a"),
        "another part": SignedStore(server, secret, "b"),
        "no secret": dist.PrefixStore("a", server),
    }[other]
    stranger.set("joined", "me")
    ours = SignedStore(server, secret, "a")
    assert not ours.check(["joined"])
    with pytest.raises(dist.DistStoreError):
        ours.wait(["joined"], SHORT)


def test_an_overwritten_or_moved_value_is_rejected(server: dist.TCPStore) -> None:
    ours = SignedStore(server, new_secret(), "a")
    ours.set("one", "1")
    first = next(name for name in server.list_keys() if name.startswith("a/"))
    ours.set("two", "2")
    second = next(n for n in server.list_keys() if n.startswith("a/") and n != first)
    server.set(second, server.get(first))
    with pytest.raises(WorkerError, match=r"'two' in the store was not written by a process"):
        ours.get("two")
    server.set(first, b"x" * SIGNATURE_BYTES + b"1")
    with pytest.raises(WorkerError, match="'one' in the store was not written"):
        ours.get("one")


def test_delete_all_removes_only_the_keys_of_its_prefix(server: dist.TCPStore) -> None:
    secret = new_secret()
    part, other = SignedStore(server, secret, "sync 1"), SignedStore(server, secret, "sync 11")
    for store in (part, other):
        store.set("joined", "me")
        store.set("complete", "yes")
        store.unsigned("gpus").set("id", "1")
    part.delete_all()
    assert not part.unsigned("gpus").check(["id"])
    assert other.unsigned("gpus").get("id") == b"1"
    assert not part.check(["joined"])
    assert not part.check(["complete"])
    assert other.check(["joined", "complete"])
