"""A step on stubs: worker groups that compute nothing, and record the calls of a step.

    nodes, problem = trace_step(config, MyTrainer)
    nodes[0].samples       # and stage, roles, method, pool, columns, and the calls that had ended

The `step` of the class runs with a tiny batch (`RunRecipe.stub_inputs`), so an overridden stage
shows the calls that it really makes. A stub returns the columns that its method declares
(`workers.columns`), with made-up numbers.
"""

from __future__ import annotations

import math
import re
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import reduce
from types import SimpleNamespace
from typing import Any, get_type_hints

import torch

from trainer.groups.worker_groups import worker_class
from trainer.launch import trainer_class
from trainer.run_state import Run
from verl_like.batch.columns import object_rows
from verl_like.batch.protocol import DataProto
from verl_like.calls.deadlines import Deadlines
from verl_like.calls.dispatch import Registration
from verl_like.calls.group import BoundMethod, WorkerGroup
from verl_like.calls.messages import ONLY_METRICS, WITH_METRICS
from verl_like.calls.result import CallResult
from verl_like.config_key import replace_keys
from verl_like.placement.pools import expand_roles
from workers.columns import COLUMNS, Column, declared_columns, format_like
from workers.config import has_environment
from workers.rollout.client import ROW_BITS
from workers.rollout.sample import REQUEST, read_samples, to_batch

DRIVER, INLINE = "driver", "the driver's process"
NUM_TOKENS = 2
"""Tokens of every prompt and response."""
TRAJECTORIES = ("turn", "environment_rewards", "ended", "trajectory")
IN_BACKGROUND = ("ping", "open_delivery", "deliver_weights", "receive_weights")
"""Calls of generators that belong to no stage."""
SIZES = (
    *("data.train_batch_size", "actor_rollout_ref.actor.ppo_mini_batch_size"),
    *("critic.ppo_mini_batch_size", "async_training.prompts_per_call"),
    "async_training.max_inflight_samples",
)
"""Keys that are smaller in a step on stubs."""
OURS = ("trainer.", "workers.")
"""The beginnings of the dotted names of our own classes."""
UNREAD = re.compile(r"(enable_gradient_checkpointing|ppo_max_token_len_per_gpu)=\w+")
"""Keys that no step reads, and that vary while passes are fitted into the memory."""
_traces: dict[tuple[type, int, str], tuple[list[CallNode], Exception | None]] = {}
"""Trainer's class, scale and small configuration -> the calls of a step, and its error."""


@dataclass(frozen=True)
class CallNode:
    """A call of a step, or a computation of the driver."""

    stage: str
    name: str
    roles: tuple[str, ...]
    """The role, or the same role of several generators; none for the driver."""
    pool: str
    place: str
    """The pool, or the driver's process: one call at a time runs there."""
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    samples: int
    """Rows of the call's batch in a real step; 0 without a batch."""
    after: frozenset[tuple[str, str]]
    """Stage and name of the nodes that had ended when the driver launched this one."""

    @property
    def key(self) -> tuple[str, str]:
        """Stage and name."""
        return self.stage, self.name

    @property
    def method(self) -> str:
        """The method of the role."""
        return self.name.rpartition(".")[2]


def our_class(trainer_cls: type) -> type:
    """Return the recipe's own class from which a user's class derives."""
    return next(cls for cls in trainer_cls.__mro__ if cls.__module__.startswith("trainer."))


def trace_step(config: Any, trainer_cls: type | None = None) -> tuple[list[CallNode], str]:
    """Return the calls of a step in the order of their launch, and why the list ends early, or "".

    The class is by default `trainer.cls`. If the run has several generators, a node stands for the
    roles of all of them. If the step of a dry run fails without code of the user in it, the stubs
    differ from what they replace, which raises.
    """
    cls = trainer_cls or trainer_class(config)
    sizes = {key: _read(config, key) for key in SIZES}
    sizes = {key: size for key, size in sizes.items() if size}
    prompts = [size for key, size in sizes.items() if not key.startswith("async_training.")]
    scale = math.gcd(*prompts, _read(config, "chunk_size") or 0)  # generators keep their shares
    small: Any = replace_keys(config, {key: size // scale for key, size in sizes.items()})
    key = cls, scale, UNREAD.sub("", repr(small))
    if key not in _traces:
        calls, error = _record(cls, small)
        _traces[key] = _nodes(config, calls, scale), error
    nodes, error = _traces[key]
    if error is None:
        return nodes, ""
    problem = f"{type(error).__name__}: {error}"
    if config.trainer.dry_run and not own_code(config, cls):
        raise AssertionError(
            f"the step of {cls.__name__} failed on stubs, which is a bug of verl_like ({problem}). "
            "Without its calls, the plan would be wrong. The run itself uses no stubs: start it "
            "without a plan, and report this traceback."
        ) from error
    return nodes, problem


def own_code(config: Any, trainer_cls: type) -> list[str]:
    """Return the names of the user's classes and functions in a step on stubs."""
    names = [f"{trainer_cls.__module__}.{trainer_cls.__qualname__}", *config.role_workers.values()]
    names += [_read(config, "algorithm.adv_estimator") or ""]
    names += [_read(config, "actor_rollout_ref.actor.policy_loss.loss_mode") or ""]
    is_path = re.compile("[.:]")
    return [name for name in names if is_path.search(name) and not name.startswith(OURS)]


def _record(cls: Any, config: Any) -> tuple[list[dict[str, Any]], Exception | None]:
    """Return the calls of a step, and its error, if it failed."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as at_end:
        groups = StubGroups(config)
        changes = {"default_local_dir": folder, "backend": "local", "resume_mode": "disable"}
        config = replace_keys(config, {f"trainer.{key}": value for key, value in changes.items()})
        at_end.callback(setattr, sys, "breakpointhook", sys.breakpointhook)
        sys.breakpointhook = lambda *_, **__: None  # the numbers are made up
        run: Any = Run(config, groups, observers=[DriverWork(groups)])  # type: ignore[arg-type]
        every = _read(config, "actor_rollout_ref.ref.update_every") or 1
        run.step = ((_read(config, "trainer.critic_warmup") or 0) // every + 1) * every
        try:
            trainer = cls(run, *cls.recipe.stub_inputs(cls, config, groups))
            if _read(config, "generates_while_training"):
                at_end.callback(trainer.buffer.close)  # ends the generators' threads
                trainer.weights.version += config.async_training.max_staleness
            trainer.before_resume()
            with trainer.clock("step"):
                trainer.step()
        except Exception as error:  # noqa: BLE001 - whatever a user's step raises on stubs
            return run.calls, error
    return run.calls, None


def _read(config: Any, name: str) -> Any:
    """Return the value at a dotted key, or None if this recipe has no such key."""
    return reduce(lambda section, part: getattr(section, part, None), name.split("."), config)


def _nodes(config: Any, calls: Sequence[dict[str, Any]], scale: int) -> list[CallNode]:
    """Return a node for all calls of a method in a stage."""
    keys: dict[int, tuple[str, str]] = {}
    by_key: dict[tuple[str, str], list[dict[str, Any]]] = {}
    left_out = IN_BACKGROUND if _read(config, "generates_while_training") else ()
    for call in calls:
        role, method = config.kind_of(call["role"]), call["method"]
        if method not in left_out:
            keys[call["number"]] = key = call["stage"], f"{role}.{method}" if role else method
            by_key.setdefault(key, []).append(call)
    pools, nodes = expand_roles(config.role_mapping), []
    for key, (call, *others) in by_key.items():
        kind = config.kind_of(call["role"])
        roles = tuple(role for role in pools if config.kind_of(role) == kind)
        used = ", ".join(dict.fromkeys(pools[role] for role in roles)) or DRIVER
        place = INLINE if call["is_inline"] else used
        samples = scale * max(other["rows"] for other in (call, *others))
        after = frozenset(keys[number] for number in call["ended"] if number in keys) - {key}
        columns = call["reads"], call["writes"]
        nodes.append(CallNode(*key, roles, used, place, *columns, samples, after))
    return nodes


class DriverWork:
    """Observes a step on stubs, and records what the driver computes between the calls."""

    def __init__(self, groups: StubGroups) -> None:
        self._groups = groups
        self._before: Sequence[str] | None = None

    def on_stage_begin(self, trainer: Any, stage: str, batch: DataProto | None) -> None:
        """Store the names of the columns that a stage gets."""
        self._before = None if batch is None else tuple(columns_in(batch))

    def on_stage_end(self, trainer: Any, stage: str, result: Any) -> None:
        """Record the columns that a stage without calls adds."""
        if self._before is not None and not self._groups.new_calls:
            written = [name for name in columns_in(result[0]) if name not in self._before]
            self._groups.compute(", ".join(written), written)

    def on_filter(self, trainer: Any, name: str, before: DataProto, after: DataProto) -> None:
        """Record a filter that changes the batch."""
        if after is not before:
            self._groups.compute(name, ())


class StubGroups:
    """The groups of a run on stubs, without processes."""

    def __init__(self, config: Any) -> None:
        self.config = config
        pools = expand_roles(config.role_mapping)
        sizes = {pool: sum(config.resource_pool_spec[pool]) for pool in pools.values()}
        plans = {name: SimpleNamespace(world_size=n, nodes=()) for name, n in sizes.items()}
        self.placement = SimpleNamespace(role_mapping=pools, pools=plans)
        self.inline = {name for name, size in sizes.items() if config.is_inline(name, size)}
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
        rows: int = 0,
    ) -> int:
        """Record a call, or a computation of the driver without a role; return its number."""
        here, number = threading.current_thread(), self._num_calls
        self._num_calls += 1
        call: dict[str, Any] = dict.fromkeys(("start", "end", "cpu_s", "rank", "pid"), 0)
        call |= {"role": role, "method": method, "pool": pool, "number": number, "rows": rows}
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
        self.groups, self.pool, self.config = groups, pool, groups.config.for_role(role)
        self.submitted: list[DataProto] = []
        """The rows that a rollout is generating."""
        # a call on one rank of a rollout has all rows
        is_rollout = groups.config.kind_of(role) == "rollout"
        transport: Any = SimpleNamespace(
            world_size=1 if is_rollout else groups.placement.pools[pool].world_size,
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
        result, groups = self._result(batches), self.group.groups
        written = columns_in(CallResult.of(result).batch)
        reads = [name for batch in batches for name in columns_in(batch)]
        rows = len(batches[0]) if batches else 0
        if self.call.method == "submit":
            rows //= len((batches[0].padded(REQUEST) >> ROW_BITS).unique())  # of one submission
        number = groups.launch(self.call.method, written, self.role, self.group.pool, reads, rows)
        return StubFuture(groups, number, result)

    def _result(self, batches: Sequence[DataProto]) -> Any:
        """Return a result of the type, and with the columns, that the method declares."""
        method, group = self.call.method, self.group
        if method == "submit":
            group.submitted += batches
        if method == "collect":
            rows, group.submitted = group.submitted, []
            return [sampled(DataProto.concat(rows), group.config)]
        if method == "generate_sequences":
            return sampled(batches[0], group.config)
        if not self.mode.returns_batch:
            return self.collect_fn(group, [default_of(self.function)])
        if self.mark.returns == ONLY_METRICS:
            return {}
        declared = declared_columns(group.roles[self.role], method)
        names = ("response_log_probs",) if declared is None else declared.writes
        batch = stub_columns(names, batches[0])
        return CallResult(batch, {}) if self.mark.returns == WITH_METRICS else batch


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


def stub_columns(names: Iterable[str], rows: DataProto) -> DataProto:
    """Return columns of the declared shapes, whose numbers differ between samples of a prompt."""
    columns: dict[str, Any] = {}
    objects: dict[str, Any] = {}
    values = -(torch.arange(len(rows)) % 2)
    for name in names:
        column = COLUMNS.get(name, Column(name, "[rows]", "float32"))
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
        for sample in read_samples(prompts, widths[0], lambda uid, index: 0)
    ]
    batch = to_batch(samples, widths, pad=0, version=0)
    if REQUEST in prompts.columns:
        batch = batch.union(prompts.select([REQUEST], []))
    return batch.union(stub_columns(TRAJECTORIES, batch)) if has_environment(config) else batch
