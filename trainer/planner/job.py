"""What is planned: a run's configuration on cards, and the ways to lay its models out on them.

A recipe's job says which roles there are, how their passes are cut (`Passes`), and what its run
would refuse. A key that the user has set has that value alone.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, ClassVar

from trainer.config import compose
from trainer.config.devices import devices_of
from trainer.config.recipe import Recipe
from trainer.launch import nominal_placement
from trainer.planner.cost import Cards, Model, Rows, pass_seconds
from trainer.planner.devices import Device
from trainer.planner.search import Option, Placement, Pool, Search
from verl_like.errors import ConfigError, PlacementError
from workers.config.model import FrozenFSDPConfig, FSDPConfig, ParallelConfig
from workers.memory import HeldModel, LargestPass, RoleMemory, memory_of, usable_bytes
from workers.parallel.dims import ParallelDims
from workers.parallel.pipeline import num_chunks
from workers.parallel.sharding import dims_of
from workers.parallel.stages import NoStages
from workers.training.axes import check_axes

SIZES = (1, 2, 4, 8)
"""Of axes that are tried."""
WORTH_A_KEY = 0.01
"""Seconds that a key must save to be moved off what it is."""
PLACING = ("placement", "resource_pool_spec", "role_mapping")
"""Keys that say where roles live: searched, and what the user says of them stands beside."""
LONG = 8192
"""Tokens of a row below which ranks share rows only where there are fewer of them than ranks."""


@dataclass(frozen=True, kw_only=True)
class Passes:
    """The calls of a role in a step, and how their rows are cut into passes."""

    calls: Sequence[tuple[str, str]]
    """(stage, method)."""
    rows: Rows
    at_once: int
    """Samples that a call has before the optimizer steps, over all ranks;"""
    read_at_once: int = 0
    """those of the calls of a trained role that only read."""
    width: int
    """Tokens of the longest row."""
    read_share: float
    """Of a row's tokens, those that the head reads: its response's, or its last one alone."""
    size_key: str
    """The key of a pass's size,"""
    sizes: Mapping[int, int]
    """and values that are tried -> tokens of the pass. The first is what there is."""
    model_key: str
    """The section of the model."""
    fsdp_key: str
    """The section of how it is sharded."""

    def largest(self, dims: ParallelDims, tokens: int) -> LargestPass:
        """Of a rank, where passes have at most so many tokens."""

        def of(samples: int) -> LargestPass:
            on_rank = -(-samples // dims.data_size) * -(-self.width // dims.sp)
            at_once = min(tokens, on_rank)
            return LargestPass(at_once, max(round(at_once * self.read_share), 1))

        alone = of(self.read_at_once) if self.read_at_once else None
        return replace(of(self.at_once), alone=alone)


@dataclass(frozen=True, eq=False, kw_only=True)
class Job(ABC):
    """What is planned: a configuration, the settings that make it, and the cards."""

    recipe: ClassVar[Recipe[Any]]
    stages: ClassVar[tuple[str, ...]]
    """Of a step that takes cards."""
    model_key: ClassVar[str]
    """The section of the model that is trained."""
    config: Any
    settings: Sequence[str]
    device: Device
    num_cards: int
    per_node: int
    defaults: Sequence[str] = ()
    """Settings below the user's: those of a run."""
    factors: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """(role, method) -> how many times the predicted seconds its calls have taken."""
    known: Search | None = None
    """What is found for another recipe of the same roles."""

    @property
    @abstractmethod
    def rows_in_words(self) -> str:
        """The data of a step."""

    @property
    @abstractmethod
    def models(self) -> dict[str, HeldModel]:
        """Role -> its model, of all that hold one."""

    @abstractmethod
    def passes(self, role: str) -> Passes:
        """Of a role with a model."""

    @abstractmethod
    def memories(self, config: Any) -> list[RoleMemory]:
        """What the roles of this run take, as the run counts it."""

    @abstractmethod
    def check_run(self, config: Any) -> None:
        """Refuse what the run would refuse before it takes a device."""

    @property
    def roles(self) -> list[str]:
        """Those that take cards."""
        return list(self.models)

    @property
    def least(self) -> tuple[float, ...]:
        """Seconds of every stage that the driver takes beside the roles."""
        return ()

    @functools.cached_property
    def keys(self) -> set[str]:
        """Those that the user set."""
        return {each.partition("=")[0].lstrip("+") for each in self.settings}

    @property
    def usable(self) -> float:
        """Bytes of a card that may be planned with."""
        alone = RoleMemory("", "", "")
        return usable_bytes([alone], self.device.type, self.device.bytes)

    @functools.cached_property
    def search(self) -> Search:
        """Over all ways to share the cards."""
        if self.known is not None:
            return replace(self.known, roles=self.roles, least=self.least)
        return Search(self.roles, self.options, self.usable, self.least)

    def best(self, num_cards: int, count: int) -> list[Placement]:
        """The fastest placements on so many cards; of one role its layouts."""
        sizes = sizes_of(num_cards, self.per_node)
        if len(self.roles) > 1:
            return self.search.best(sizes, num_cards, count, of_each=count > 1)
        found = [
            Placement((Pool(cards, (option,)),), self.least)
            for cards in sizes
            for option in self.options(self.roles[0], cards)
        ]
        return sorted(found, key=lambda placement: placement.step)[:count]

    @functools.cached_property
    def own_pools(self) -> list[tuple[tuple[str, ...], int]]:
        """Roles and cards of every pool that the user has set; none where no key places a role."""
        if not any(map(places_roles, self.keys)):
            return []
        pools = nominal_placement(self.config).pools.values()
        found = [(tuple(r for r in self.roles if r in p.roles), p.world_size) for p in pools]
        return [(roles, cards) for roles, cards in found if roles]

    def own_placement(self) -> Placement | None:
        """The user's pools with the fastest layouts that fit there; None where none do."""
        ways = (self.search.pools(roles, cards) for roles, cards in self.own_pools)
        placements = (Placement(pools, self.least) for pools in product(*ways))
        return min(placements, key=lambda placement: placement.step, default=None)

    def overrides(self, placement: Placement) -> list[str]:
        """The keys that place and lay out the roles so."""
        found = ["placement=colocate"] if len(placement.pools) == 1 else []
        if not found:
            for pool in placement.pools:
                name = f"{pool.roles[0]}_cards"
                found += [pool_key(name, pool.cards, self.per_node)]
                found += [f"role_mapping.{role}={name}" for role in pool.roles]
        elif placement.cards < self.num_cards:
            found.append(pool_key("global_pool", placement.cards, self.per_node))
        return [*found, *layout_keys(placement)]

    def configured(self, placement: Placement) -> Any:
        """The configuration of a run with its keys."""
        cluster = cluster_keys(self.device, self.num_cards, self.per_node)
        others = [each for each in self.settings if not places_roles(each)]
        settings = [*others, *cluster, *self.overrides(placement)]
        return compose.load_config(settings, self.recipe, self.defaults)

    def why_refused(self, placement: Placement) -> str | None:
        """What a run with its keys would be refused for; None if it would begin."""
        try:
            config = self.configured(placement)
            nominal_placement(config)
            self.check_run(config)
        except (ConfigError, PlacementError) as error:
            return str(error)
        return None

    def memory(self, placement: Placement) -> tuple[list[RoleMemory], Any]:
        """Of every role, and the devices that it is held against."""
        config = self.configured(placement)
        return self.memories(config), devices_of(config.trainer)

    def check(self) -> None:
        """Refuse axes of the user's that a model cannot have."""
        for role, held in self.models.items():
            axes = held.parallel or ParallelConfig()
            self._check_axes(role, ParallelDims(tp=axes.tp, sp=axes.sp, pp=axes.pp))

    def options(self, role: str, num_cards: int) -> list[Option]:
        """All layouts of the role on so many cards that fit on them when it has them alone."""
        return [each for each in self.tried(role, num_cards) if self.fits(each)]

    def least_bytes(self, role: str, num_cards: int) -> float | None:
        """On each of so many cards, whether it fits or not; None where it has no layout on them."""
        return min((each.kept + each.call for each in self.tried(role, num_cards)), default=None)

    def fits(self, option: Option) -> bool:
        """Whether it fits on a card that it has alone."""
        return option.kept + option.call <= self.usable

    @functools.cache  # noqa: B019 - a job lives as long as its plan
    def tried(self, role: str, num_cards: int) -> list[Option]:
        """All layouts of the role on so many cards, whether they fit or not."""
        return self.layouts(role, Cards(self.device, num_cards, self.per_node))

    def may(self, key: str, now: Any, others: Collection[Any]) -> list[Any]:
        """The values of a key that are tried: what the user set, or what there is and others."""
        return [now] if key in self.keys else list(dict.fromkeys([now, *others]))

    def layouts(self, role: str, cards: Cards) -> list[Option]:
        """Of a model that is sharded.

        Stages of layers wait for each other, and what they save of sending and of memory matters
        where tensor and sequence parallelism fill a machine, or where nothing fits without. They
        are tried there alone, of models that are trained, and kept where they are faster.
        """
        held = self.models[role]
        key, now = f"{held.axes_key}.pp", (held.parallel or ParallelConfig()).pp
        found = list(self._layouts(role, cards, (now,)))
        others = [each for each in self.may(key, now, SIZES) if each != now]
        if others and held.trains and _has_axes(held) and self._states_fit(role, cards):
            fitting = (sum(option.seconds) for option in found if self.fits(option))
            found += self._layouts(role, cards, others, faster_than=min(fitting, default=math.inf))
        return found

    def _states_fit(self, role: str, cards: Cards) -> bool:
        """Whether weights, gradients and moments fit if every card has its share of them, which
        no axes make smaller."""
        held, kind = self.models[role], self.device.type
        try:
            replicas = dims_of(cards.num, held.sharding).replicate
            memory = memory_of(held, role, "pool", cards.num, kind, LargestPass(1, 1))
        except ConfigError:  # of the axes that there are, which others may mend
            return True
        states = memory.weights + memory.gradients + memory.moments
        return states / replicas <= self.usable

    def _layouts(
        self, role: str, cards: Cards, stages: Sequence[int], faster_than: float = math.inf
    ) -> Iterator[Option]:
        """Axes, recomputation, offloading, size of a pass."""
        held, passes = self.models[role], self.passes(role)
        trains = held.trains
        asked = held.model.enable_gradient_checkpointing
        recomputes = self.device.type == "cuda" if asked is None else asked
        offloads = held.sharding.param_offload
        again_key = f"{passes.model_key}.enable_gradient_checkpointing"
        offload_key = f"{passes.fsdp_key}.param_offload"
        now = held.parallel or ParallelConfig()
        size_now = next(iter(passes.sizes))
        memories: dict[tuple[ParallelDims, str, bool], RoleMemory] = {}
        for axes, size, again, moved in product(
            self._axes(role, cards, stages, only_wide=faster_than < math.inf),
            self.may(passes.size_key, size_now, passes.sizes),
            self.may(again_key, recomputes, (True, False) * trains),
            self.may(offload_key, offloads, (True,) * trains),
        ):
            laid = replace(
                held,
                parallel=held.parallel and axes,
                model=replace(held.model, enable_gradient_checkpointing=again),
                fsdp=_offloading(held.fsdp, moved),
            )
            try:
                dims = dims_of(cards.num, laid.sharding)
                seconds = self._seconds(role, laid, dims, cards, passes.sizes[size])
                if sum(seconds) > faster_than:
                    continue
                if (dims, size, again) not in memories:  # offloading changes its place alone
                    largest = passes.largest(dims, passes.sizes[size])
                    memories[dims, size, again] = memory_of(
                        laid, role, "pool", cards.num, self.device.type, largest
                    )
                memory = memories[dims, size, again].offloaded(laid.sharding, self.device.type)
            except (ConfigError, NoStages):
                continue
            if axes.pp != now.pp:  # proven on a small model, which takes seconds: if it fits
                fits = memory.kept + memory.call <= self.usable
                if not fits or not self._can(role, ParallelDims(pp=dims.pp, ep=dims.ep)):
                    continue
            changed = {
                passes.size_key: (size, size_now),
                **{
                    f"{held.axes_key}.{axis}": (getattr(axes, axis), getattr(now, axis))
                    for axis in ("shard", "tp", "sp", "pp", "ep")
                },
                again_key: (again, recomputes),
                offload_key: (moved, offloads),
                offload_key.replace("param", "optimizer"): (moved, offloads),
            }
            keys = {key: str(new).lower() for key, (new, old) in changed.items() if new != old}
            at = self.stages.index("update" if trains else passes.calls[0][0]) if keys else 0
            seconds[at] += len(keys) * WORTH_A_KEY
            yield Option(role, tuple(seconds), memory.kept, memory.call, keys)

    def _seconds(
        self, role: str, laid: HeldModel, dims: ParallelDims, cards: Cards, tokens: int
    ) -> list[float]:
        """Of the role's calls, by stage."""
        seconds = dict.fromkeys(self.stages, 0.0)
        for stage, method in self.passes(role).calls:
            factor = self.factors.get((role, method), 1.0)
            seconds[stage] += factor * self.call_seconds(role, method, laid, dims, cards, tokens)
        return list(seconds.values())

    def call_seconds(
        self,
        role: str,
        method: str,
        laid: HeldModel,
        dims: ParallelDims,
        cards: Cards,
        tokens: int,
    ) -> float:
        """Of a call of the role, laid out so, by passes of so many tokens."""
        return pass_seconds(
            self.numbers[role],
            self.passes(role).rows,
            dims,
            tokens,
            cards,
            trains=method.startswith("update_"),
            recomputes=bool(laid.model.enable_gradient_checkpointing),
            offloads=laid.sharding.param_offload,
            num_stages=num_chunks(laid.sharding.pp_schedule),
        )

    def _axes(
        self, role: str, cards: Cards, stages: Sequence[int], only_wide: bool
    ) -> Iterator[ParallelConfig]:
        """Those that the role's ranks and its model can have."""
        held, passes = self.models[role], self.passes(role)
        now, key = held.parallel or ParallelConfig(), held.axes_key
        splits = passes.width > LONG or passes.rows.samples // passes.rows.mini_batches < cards.num
        has_axes, has_experts = _has_axes(held), self.numbers[role].in_experts > 0
        shards = () if cards.num <= self.per_node or not has_axes else (self.per_node,)
        for shard, tp, sp, ep, pp in product(
            self.may(f"{key}.shard", now.shard, shards),
            self.may(f"{key}.tp", now.tp, SIZES * has_axes),
            self.may(f"{key}.sp", now.sp, SIZES * (has_axes and splits)),
            self.may(f"{key}.ep", now.ep, SIZES * (has_axes and has_experts)),
            stages,
        ):
            if only_wide and tp * sp < cards.per_node:
                continue
            if ep != now.ep and tp * sp > 1:  # ranks that share matrices share experts' already
                continue
            shard = shard if shard == now.shard else shard // (tp * sp)  # in one machine
            ranks = tp * sp * pp
            most = max(passes.at_once, passes.read_at_once)
            if cards.num % ranks or tp * sp > cards.per_node or cards.num // ranks > most:
                continue  # of more ranks than samples some would have none
            of_experts = cards.num // pp if shard < 1 else shard * sp * tp
            alone = [ParallelDims(tp=tp), ParallelDims(sp=sp)]
            if ep > 1:
                alone.append(ParallelDims(ep=ep, shard=max(of_experts, ep)))
            if all(self._can(role, dims) for dims in alone):
                yield replace(now, shard=shard, tp=tp, sp=sp, ep=ep, pp=pp)

    @functools.cached_property
    def numbers(self) -> dict[str, Model]:
        """Role -> what its times depend on."""
        return {role: Model.of(held) for role, held in self.models.items()}

    def _check_axes(self, role: str, dims: ParallelDims) -> None:
        held = self.models[role]
        schedule = held.sharding.pp_schedule
        check_axes(held.meta_module, held.model, dims, held.axes_key, schedule)

    @functools.cache  # noqa: B019 - a job lives as long as its plan
    def _can(self, role: str, dims: ParallelDims) -> bool:
        """Whether the role's model can be laid over these axes."""
        try:
            self._check_axes(role, dims)
        except ConfigError:
            return False
        return True


def _has_axes(held: HeldModel) -> bool:
    return held.parallel is not None and not held.quantization


def _offloading(fsdp: FrozenFSDPConfig, moved: bool) -> FrozenFSDPConfig:
    if isinstance(fsdp, FSDPConfig):
        return replace(fsdp, param_offload=moved, optimizer_offload=moved)
    return replace(fsdp, param_offload=moved)


def cluster_keys(device: Device, num_cards: int, per_node: int) -> list[str]:
    """Overrides that plan with so many of the cards."""
    on_node = min(num_cards, per_node)
    what = f"trainer.pretend={on_node}x{device.gib:g}GiB"
    return [
        "trainer.device=cpu" if device.type == "cpu" else what,
        f"trainer.nnodes={num_cards // on_node}",
        f"trainer.n_gpus_per_node={on_node}",
    ]


def sizes_of(num_cards: int, per_node: int) -> list[int]:
    """Sizes of pools that are tried: powers of two in a machine, and whole machines."""
    nodes = num_cards // per_node
    numbers = [n for n in range(1, nodes + 1) if nodes <= 8 or n == nodes or _few_factors(n)]
    in_node = [n for n in (1, 2, 4, 8, 16) if n <= min(num_cards, per_node)]
    return sorted({*in_node, min(num_cards, per_node), *(per_node * n for n in numbers)})


def _few_factors(number: int) -> bool:
    """Whether it is a power of two, or three of one."""
    while number % 2 == 0:
        number //= 2
    return number in (1, 3)


def places_roles(setting: str) -> bool:
    """Whether this key, with a value or without, says where roles live."""
    return setting.lstrip("+~").partition("=")[0].partition(".")[0] in PLACING


def pool_key(name: str, cards: int, per_node: int) -> str:
    """The override of a pool of so many cards."""
    on_node = min(cards, per_node)
    return f"resource_pool_spec.{name}={[on_node] * (cards // on_node)}".replace(" ", "")


def layout_keys(placement: Placement) -> list[str]:
    """The overrides of all layouts."""
    options = [option for pool in placement.pools for option in pool.options]
    return [f"{key}={value}" for option in options for key, value in option.keys.items()]
