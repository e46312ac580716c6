"""A step on stubs: worker groups that compute nothing, and record the calls of a step.

    trainer = MyTrainer(Run(config, StubGroups(config, config.is_inline)), *inputs)
    with trainer.clock("step"):
        trainer.step()
    trainer.run.calls      # role, method, pool, stage, columns, and the calls that had ended

A stub returns the columns that its method declares (`workers.columns`), with made-up numbers.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, get_type_hints

import torch

from trainer.groups.worker_groups import worker_class
from verl_like.batch.columns import object_rows
from verl_like.batch.protocol import DataProto
from verl_like.calls.deadlines import Deadlines
from verl_like.calls.dispatch import Registration
from verl_like.calls.group import BoundMethod, WorkerGroup
from verl_like.calls.result import CallResult
from verl_like.calls.wire import BOTH, METRICS
from verl_like.placement.roles import expand_roles
from workers.columns import COLUMNS, columns_of, format_like
from workers.config import has_environment
from workers.rollout.batches import REQUEST, batch_of, samples_of

DRIVER, INLINE = "driver", "the driver's process"
NUM_TOKENS = 2
"""Tokens of every prompt and response."""
TRAJECTORIES = ("turn", "environment_rewards", "ended", "trajectory")


class StubGroups:
    """The groups of a run on stubs, without processes."""

    def __init__(self, config: Any, is_inline: Callable[[str, int], bool]) -> None:
        """`is_inline` says of a pool and its size whether it runs in the driver's thread."""
        self.config = config
        pools = expand_roles(config.role_mapping)
        sizes = {pool: sum(config.resource_pool_spec[pool]) for pool in pools.values()}
        plans = {name: SimpleNamespace(world_size=n, nodes=()) for name, n in sizes.items()}
        self.placement = SimpleNamespace(role_mapping=pools, pools=plans)
        self.inline = {name for name, size in sizes.items() if is_inline(name, size)}
        self._groups = {role: StubGroup(self, role, pool) for role, pool in pools.items()}
        self.new_calls: list[dict[str, Any]] = []
        """The calls since `take_calls`."""
        self._num_calls = 0
        self._driver, self._ended = threading.current_thread(), defaultdict[Any, set[int]](set)
        """The driver's thread, and by thread the numbers of the calls that it has waited for."""

    def __getitem__(self, role: str) -> StubGroup:
        return self._groups[role]

    def __iter__(self) -> Iterator[str]:
        return iter(self._groups)

    def take_calls(self) -> list[dict[str, Any]]:
        """Return the calls since the last time."""
        calls, self.new_calls = self.new_calls, []
        return calls

    def check_idle(self, wait_name: str) -> None:
        """Do nothing: no process can be lost."""

    def launch(
        self,
        method: str,
        writes: Iterable[str],
        role: str = "",
        pool: str = DRIVER,
        reads: Iterable[str] = (),
    ) -> int:
        """Record a call, or a computation of the driver without a role; return its number."""
        here, number = threading.current_thread(), self._num_calls
        self._num_calls += 1
        call: dict[str, Any] = dict.fromkeys(("start", "end", "cpu_s", "rank", "pid"), 0)
        call |= {"role": role, "method": method, "pool": pool, "number": number}
        call |= {"reads": tuple(reads), "writes": tuple(writes), "is_inline": pool in self.inline}
        if here == self._driver:  # it has waited for its threads
            self._ended = defaultdict(set, {here: set().union(*self._ended.values())})
        call["ended"] = self._ended[self._driver] | self._ended[here]
        self.new_calls.append(call)
        if pool in self.inline:
            self.end(number)
        return number

    def compute(self, name: str, writes: Iterable[str]) -> None:
        """Record a computation of the driver that has ended for all threads."""
        number = self.launch(name, writes)
        self._ended[self._driver].add(number)

    def end(self, number: int) -> None:
        """Record that this thread has waited for a call."""
        self._ended[threading.current_thread()].add(number)


class StubGroup(WorkerGroup):
    """The group of one role."""

    def __init__(self, groups: StubGroups, role: str, pool: str) -> None:
        self.groups, self.pool, self.config = groups, pool, groups.config.of_role(role)
        self.submitted: dict[int | None, list[DataProto]] = defaultdict(list)
        """By rank: the rows that a rollout is generating."""
        transport: Any = SimpleNamespace(
            world_size=groups.placement.pools[pool].world_size,
            started=[],
            process_key=INLINE if pool in groups.inline else pool,
            deadlines=Deadlines(),
            is_replaceable=False,
            check_idle=groups.check_idle,
        )
        super().__init__(transport, {role: worker_class(groups.config, role)}, prefixed=())

    def bind(
        self, role: str, method: str, function: Callable[..., Any], mark: Registration
    ) -> BoundMethod:
        """Return the stub of a method."""
        return StubMethod(self, role, method, function, mark)


class StubMethod(BoundMethod):
    """A method that records its calls, and returns what its worker's method declares."""

    group: StubGroup

    def collecting_ranks(self) -> list[int]:
        """Return all ranks."""
        return list(range(self.group.world_size))

    def remote_on(self, rank: int | None, /, *args: Any, **kwargs: Any) -> Any:
        """Record the call, and return a future of its result."""
        passed = [*args, *kwargs.values()]
        values = [value.batch() if isinstance(value, StubFuture) else value for value in passed]
        batches = [value for value in values if isinstance(value, DataProto)]
        result, groups = self._result(rank, batches), self.group.groups
        written = columns_in(CallResult.of(result).batch)
        reads = [name for batch in batches for name in columns_in(batch)]
        number = groups.launch(self.call.method, written, self.role, self.group.pool, reads)
        return StubFuture(groups, number, result)

    def _result(self, rank: int | None, batches: Sequence[DataProto]) -> Any:
        method, group = self.call.method, self.group
        if method == "submit":
            group.submitted[rank] += batches
        if method == "take":
            rows = group.submitted.pop(rank, [])
            return [sampled(DataProto.concat(rows), group.config) if rows else None]
        if method == "generate_sequences":
            return sampled(batches[0], group.config)
        if not self.mode.returns_batch:
            return self.collect_fn(group, [default_of(self.function)])
        if self.mark.returns == METRICS:
            return {}
        declared = columns_of(group.roles[self.role], method)
        batch = made_up(() if declared is None else declared.writes, batches[0])
        return CallResult(batch, {}) if self.mark.returns == BOTH else batch


class StubFuture:
    """A result that is there at once; a wait for it is recorded."""

    def __init__(
        self, groups: StubGroups, number: int, value: Any, others: Sequence[Any] = ()
    ) -> None:
        """A wait also waits for the futures in `others`."""
        self._groups, self._number, self._value, self._others = groups, number, value, others

    def done(self) -> bool:
        """Return True."""
        return True

    def get(self, timeout: float | None = None) -> Any:
        """Return the result."""
        for other in self._others:
            other.get()
        self._groups.end(self._number)
        return self._value

    def batch(self, timeout: float | None = None) -> Any:
        """Return the batch of the result."""
        return CallResult.of(self.get()).batch


def columns_in(batch: Any) -> dict[str, Any]:
    """Return all columns of a batch by name; {} of another value."""
    return {**batch.columns, **batch.non_tensor_batch} if isinstance(batch, DataProto) else {}


def default_of(function: Callable[..., Any]) -> Any:
    """Return a value of the type that the function declares to return, such as 0, or None."""
    try:
        return get_type_hints(function)["return"]()
    except (KeyError, NameError, TypeError):
        return None


def made_up(names: Iterable[str], rows: DataProto) -> DataProto:
    """Return columns of the declared shapes, whose numbers differ between samples of a prompt."""
    columns: dict[str, Any] = {}
    objects: dict[str, Any] = {}
    values = -(torch.arange(len(rows)) % 2)
    for name in names:
        column = COLUMNS[name]
        if column.dtype == "object":
            objects[name] = object_rows([{}] * len(rows))
        elif column.shape == "[rows]":
            columns[name] = values.to(getattr(torch, column.dtype))
        else:
            mask = rows.column("response_mask")
            rectangle = values[:, None].expand(mask.shape).to(getattr(torch, column.dtype))
            columns[name] = format_like(mask, rectangle)
    return DataProto.from_dict(columns, objects)


def sampled(prompts: DataProto, config: Any) -> DataProto:
    """Return samples of these prompts."""
    widths = config.data.max_prompt_length, config.data.max_response_length
    tokens, log_probs = torch.zeros(NUM_TOKENS).long(), torch.zeros(NUM_TOKENS, 1)
    samples = [
        sample.with_response(tokens, log_probs, tokens.int(), "stop")
        for sample in samples_of(prompts, widths[0], lambda uid, index: 0)
    ]
    batch = batch_of(samples, widths, pad=0, version=0)
    if REQUEST in prompts.columns:
        batch = batch.union(prompts.select([REQUEST], []))
    return batch.union(made_up(TRAJECTORIES, batch)) if has_environment(config) else batch
