"""The same worker classes and driver code on every backend: inline, child processes, Ray."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.verl_like.groups import start
from tests.verl_like.sample_workers import Adder, BadConstructor, Faulty, Modes, Shadow
from tests.waiting import wait_until
from verl_like import (
    ClassWithInitArgs,
    DataProto,
    DataProtoFuture,
    Dispatch,
    LocalWorkerGroup,
    ResourcePool,
    gather,
    register,
)
from verl_like.errors import ConfigError, DispatchError, PlacementError, WorkerError

BACKENDS = [("inline", [1]), ("child", [2]), pytest.param(("ray", [2]), marks=pytest.mark.ray)]


def current_place() -> tuple[int, int]:
    return os.getpid(), threading.get_ident()


def batch(rows: int = 5, **meta: object) -> DataProto:
    x = torch.arange(rows)
    return DataProto.from_dict(
        {"x": x}, {"o": np.array([f"s{i}" for i in range(rows)], dtype=object)}, meta_info=meta
    )


@pytest.fixture(scope="module", params=BACKENDS, ids=lambda p: p[0])
def backend(request: pytest.FixtureRequest) -> tuple[str, list[int]]:
    if request.param[0] == "ray":
        request.getfixturevalue("ray_session")
    return request.param


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def fused(backend, logs):
    roles = {
        "modes": (Modes, ()),
        "adder": (Adder, (1,)),
        "add": (Adder, (10,)),
        "faulty": (Faulty, ()),
    }
    with start(backend[0], roles, backend[1], log_dir=str(logs), seed=3) as group:
        yield group


@pytest.fixture
def groups(fused):
    return fused.spawn(fused.roles)


def test_methods_have_a_prefix_only_on_the_fused_group(fused, groups) -> None:
    assert fused.adder_add(batch()).batch["x"].tolist() == [1, 2, 3, 4, 5]
    assert groups["adder"].add(batch()).batch["x"].tolist() == [1, 2, 3, 4, 5]
    assert groups["add"].add(batch()).batch["x"].tolist() == [10, 11, 12, 13, 14]
    assert fused.adder_pid() == fused.add_pid() == groups["adder"].pid()
    assert groups["adder"].shares_processes_with(groups["add"])
    with pytest.raises(PlacementError, match="has no role 'ader'. Did you mean 'adder'"):
        fused.spawn(["ader"])


def test_a_local_pool_of_one_runs_in_the_callers_thread(groups, backend) -> None:
    place = groups["adder"].execute_func_rank_zero(current_place)
    assert (place == current_place()) is (backend[0] == "inline")


def test_roles_of_a_process_find_their_siblings(groups) -> None:
    assert set(groups["adder"].sibling_amount("add")) == {10}
    assert set(groups["adder"].sibling_amount("nobody")) == {None}


def test_uneven_batches_return_whole_and_the_input_is_unchanged(groups) -> None:
    for rows in (1, 2, 5):
        data = batch(rows)
        result = groups["adder"].add(data)
        later = groups["adder"].add.remote(data)
        assert isinstance(later, DataProtoFuture)
        for r in (result, later.get()):
            assert r.batch["x"].tolist() == [1 + i for i in range(rows)]
            assert r.non_tensor_batch["o"].tolist() == data.non_tensor_batch["o"].tolist()
        assert data.batch["x"].tolist() == list(range(rows))


def test_writes_into_a_result_are_private(groups) -> None:
    future = groups["modes"].same.remote(batch(4))
    future.get().batch["x"].fill_(9)
    assert groups["modes"].same(future).batch["x"].tolist() == [0, 1, 2, 3]
    (first, *_) = groups["modes"].chunks(future)
    first.batch["x"].fill_(9)
    assert groups["modes"].same(future).batch["x"].tolist() == [0, 1, 2, 3]


def test_writes_into_large_batches_are_private(groups) -> None:
    big = DataProto.from_dict(
        {"x": torch.zeros(4, 10_000, dtype=torch.int64)}, {"o": np.array(["a"] * 4, object)}
    )
    assert groups["modes"].overwrite(big).batch["x"].unique().tolist() == [-1]
    assert big.batch["x"].unique().tolist() == [0]
    assert groups["modes"].overwrite(groups["modes"].same.remote(big)).batch[
        "x"
    ].unique().tolist() == [-1]


def first_after_adding_1(value: torch.Tensor | np.ndarray) -> float:
    value += 1
    return float(value[0])


@pytest.mark.parametrize("size", [10, 50_000])
def test_a_worker_may_write_into_a_tensor_or_array(groups, size: int) -> None:
    for value in (torch.zeros(size), np.zeros(size)):
        assert groups["adder"].execute_func_rank_zero(first_after_adding_1, value) == 1.0
        assert not value.any()


def test_futures_can_be_chained_between_groups(groups) -> None:
    future = groups["adder"].add.remote(batch())
    for _ in range(3):
        future = groups["add"].add.remote(future)
    assert future.get().batch["x"].tolist() == [31, 32, 33, 34, 35]
    assert future.done()
    both = groups["modes"].add(future, more=future)
    assert both.batch["x"].tolist() == [62, 64, 66, 68, 70]
    assert set(groups["modes"].describe(groups["modes"].rank_zero.remote(1))) == {"tuple (0, 1)"}


def test_a_method_declared_to_return_none_may_return_a_value(fused, groups) -> None:
    nothing = groups["adder"].say.remote("nothing")
    assert nothing.get() == [None] * fused.world_size
    assert set(groups["modes"].describe(nothing)) == {f"list {nothing.get()}"}
    assert groups["faulty"].returns_all_the_same() == [3] * fused.world_size


def test_a_future_with_metrics_is_passed_on_as_its_batch(groups, backend) -> None:
    modes, num_workers = groups["modes"], backend[1][0]
    ranks = [value for rank in range(num_workers) for value in (rank, rank + 0.5)]
    result, metrics = modes.with_metrics(batch(4))
    assert result.batch["x"].tolist() == [0, 1, 2, 3]
    assert "metrics" not in result.meta_info
    assert metrics["ranks"] == ranks
    assert sum(metrics["sum"]) == 6
    assert metrics["first"] == [0.5]
    assert {type(value) for values in metrics.values() for value in values} <= {int, float}

    future = modes.with_metrics.remote(batch(5))
    assert groups["adder"].add(future).batch["x"].tolist() == [1, 2, 3, 4, 5]
    assert set(modes.describe(future)) == {"5 rows"}
    assert future.get()[1]["ranks"] == ranks

    assert modes.metrics_alone(batch(4))["ranks"] == ranks
    with pytest.raises(
        DispatchError, match="returned no batch, but its future was passed on as a batch"
    ):
        modes.same(modes.metrics_alone.remote(batch(4)))
    with pytest.raises(DispatchError, match="returned metric 'lengths' as Tensor of shape"):
        modes.metrics_of_a_tensor(batch(4))


def test_an_error_keeps_its_type_and_traceback_across_futures(groups) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        groups["faulty"].raises(batch())
    (note, *_) = caught.value.__notes__
    assert "raised in faulty.raises, faulty rank 0 of" in note
    assert "sample_workers.py" in note
    assert caught.value.filename == "here"
    with pytest.raises(FileNotFoundError):
        groups["adder"].add(groups["faulty"].raises.remote(batch()))
    with pytest.raises(KeyError, match="only here"):
        groups["faulty"].raises_on_last(batch())


def test_unpicklable_errors_and_results_name_their_call(groups, backend) -> None:
    with pytest.raises(
        WorkerError, match=r"faulty.raises_unpicklable, .* raised .*sample_workers.Sent"
    ) as caught:
        groups["faulty"].raises_unpicklable()
    assert "kept back" in "".join(caught.value.__notes__)
    if backend[0] != "inline":
        with pytest.raises(WorkerError, match=r"faulty.returns_unpicklable, .* cannot"):
            groups["faulty"].returns_unpicklable()
    assert len(set(groups["adder"].pid())) == backend[1][0], "the processes still run"


def test_gather_waits_for_all_and_raises_the_first_failure_with_the_others(groups) -> None:
    good, bad = groups["adder"].add.remote(batch()), groups["faulty"].raises.remote(batch())
    worse = groups["faulty"].raises_on_last.remote(batch())
    with pytest.raises(FileNotFoundError) as caught:
        gather(bad, good, worse)
    assert [type(other) for other in caught.value.others] == [KeyError]
    assert any("also failed: KeyError" in note for note in caught.value.__notes__)
    assert good.done()
    values = gather(good, groups["adder"].add.remote(batch(1)), timeout=30)
    assert [len(v) for v in values] == [5, 1]


def test_a_failure_without_a_reader_is_logged(groups, caplog: pytest.LogCaptureFixture) -> None:
    future = groups["faulty"].raises.remote(batch())
    wait_until(future.done)
    del future
    groups["adder"].pid.remote().transport.report_abandoned()
    assert any(
        "faulty.raises failed and its result was never read" in r.getMessage()
        for r in caplog.records
    )


def test_each_role_has_a_log_per_rank(fused, groups, logs: Path) -> None:
    groups["adder"].say("hello from adder")
    for rank in range(fused.world_size):
        assert "hello from adder" in (logs / f"adder-{rank}.log").read_text()
        assert "hello" not in (logs / f"add-{rank}.log").read_text()
        assert fused.transport.describe(rank, "adder").endswith(f"log {logs}/adder-{rank}.log)")


def test_each_role_draws_its_own_numbers(groups) -> None:
    first = groups["adder"].draw()
    groups["add"].draw()
    caller = torch.random.get_rng_state()
    second = groups["adder"].draw()
    assert torch.equal(caller, torch.random.get_rng_state())
    assert len({*first, *second}) == len(first) * 2


def test_roles_share_a_process_group(groups) -> None:
    expected = sum(range(1, groups["adder"].world_size + 1))
    assert (
        groups["adder"].allreduce()
        == groups["add"].allreduce()
        == [expected] * groups["adder"].world_size
    )


def test_a_concurrent_method_runs_during_another_call(groups, backend) -> None:
    answers: list[object] = []
    waiting = threading.Thread(
        target=lambda: answers.extend(groups["faulty"].waits_to_be_stopped().get())
    )
    waiting.start()
    wait_until(lambda: all(groups["faulty"].is_waiting()))
    num_workers = backend[1][0]
    assert groups["faulty"].stop("given") == ["given"] * num_workers
    waiting.join(30)
    assert answers == ["stopped"] * num_workers
    with pytest.raises(FileNotFoundError, match="there") as caught:
        groups["faulty"].raises_concurrently()
    assert "raised in faulty.raises_concurrently, faulty rank 0" in caught.value.__notes__[0]
    assert groups["faulty"].returns_concurrently() == [4] * num_workers
    assert set(groups["modes"].describe(groups["faulty"].stop.remote("passed on"))) == {
        f"list {['passed on'] * num_workers}"
    }
    with pytest.raises(
        DispatchError,
        match="faulty.stop is registered with concurrent=True, so each argument must be below",
    ):
        groups["faulty"].stop(batch(100_000))
    with pytest.raises(DispatchError, match="concurrent=True. works only with"):
        register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, concurrent=True)


def test_a_constructor_that_raises_shows_its_traceback_once(backend) -> None:
    with (
        pytest.raises(ValueError, match="no such model") as caught,
        start(backend[0], {"bad": (BadConstructor, ())}, backend[1]),
    ):
        pass
    text = "\n".join(caught.value.__notes__)
    assert text.count("Traceback") == 1
    assert "start of bad, bad rank" in text


def test_bad_names_and_environments_are_rejected_before_the_start(backend) -> None:
    with (
        pytest.raises(DispatchError, match=r"'spawn' of shadow \(Shadow\) would shadow an attr"),
        start(backend[0], {"shadow": (Shadow, ())}, backend[1]),
    ):
        pass
    env = {"worker_env": {"RANK": "3", "MINE": "1"}}
    with (
        pytest.raises(ConfigError, match="the launcher sets RANK"),
        start(backend[0], {"a": (Adder, ())}, [1], **env),
    ):
        pass


def test_worker_env_reaches_the_workers(backend) -> None:
    if backend[0] == "inline":
        with (
            pytest.raises(ConfigError, match="Set os.environ"),
            start("inline", {"a": (Adder, ())}, [1], worker_env={"A": "b"}),
        ):
            pass
        return
    with start(backend[0], {"a": (Adder, ())}, backend[1], worker_env={"MINE": "yes"}) as group:
        assert group.variable("MINE") == ["yes", "yes"]
        assert group.variable("RANK") == ["0", "1"]
        assert group.variable("OMP_NUM_THREADS") == ["1", "1"]


def test_workers_compute_with_the_threads_of_their_group(backend) -> None:
    for threads in (2, 1):
        with start(backend[0], {"a": (Adder, ())}, backend[1], threads=threads) as group:
            assert set(group.num_threads()) == {threads}
    assert torch.get_num_threads() == 1


def test_a_call_after_shutdown_raises_in_every_group() -> None:
    roles = {"first": (Adder, (1,)), "second": (Adder, (2,))}
    with start("inline", roles, [1]) as fused:
        second = fused.spawn(["second"])["second"]
        assert repr(fused) == "<LocalWorkerGroup first+second, world_size=1>"
        assert len(second.add(batch())) == 5
    with pytest.raises(WorkerError, match="second.add: the group second was shut down"):
        second.add(batch())
    with pytest.raises(WorkerError, match="the group first.second was shut down"):
        fused.first_add.remote(batch())
    assert repr(second) == "<WorkerGroup second, world_size=1, shut down>"


def test_an_error_in_its_block_shuts_a_group_down() -> None:
    with pytest.raises(ZeroDivisionError), start("inline", {"a": (Adder, ())}, [1]) as group:
        raise ZeroDivisionError
    with pytest.raises(WorkerError, match="was shut down"):
        group.pid()


def test_a_group_needs_a_pool_and_a_class_with_its_arguments() -> None:
    with pytest.raises(
        PlacementError, match=r"needs a ResourcePool, not list: ResourcePool\(\[2\]"
    ):
        LocalWorkerGroup([2], ClassWithInitArgs(Adder, 1))
    with pytest.raises(
        PlacementError, match=r"must be a ClassWithInitArgs: ClassWithInitArgs\(Adder, \.\.\.\)"
    ):
        LocalWorkerGroup(ResourcePool([1]), Adder)


def test_errors_name_the_class_of_a_group_without_a_name() -> None:
    with (
        LocalWorkerGroup(ResourcePool([1]), ClassWithInitArgs(Adder, 1)) as group,
        pytest.raises(DispatchError, match="^Adder.add: argument 'data' must be a DataProto"),
    ):
        group.add(3)
