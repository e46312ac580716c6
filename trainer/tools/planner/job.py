"""A planning job: a run's configuration, GPUs, and the layouts of its models on them.

`RowsJob` is the job of recipes that train on rows; `trainer.tools.planner.ppo` has PPO's.

A layout is a set of keys. Its memory is computed by `workers.memory` from the configuration with
these keys, as for a run, and its seconds by `trainer.tools.planner.cost`. A key that the user has
set keeps its value.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, ClassVar

from trainer.config import compose
from trainer.config.devices import GIB_OF_GPUS
from trainer.config.schema import Recipe
from trainer.config.settings import overrides_of
from trainer.launch import nominal_placement, trainer_class
from trainer.memory import role_models
from trainer.rows.config import RowConfig
from trainer.rows.trainer import longest_row, pass_tokens, preflight, role_memories
from trainer.stubs import CallNode, our_class, own_code, trace_step
from trainer.tools.planner.cost import Device, Gpus, ModelCost, StepRows, pass_seconds
from trainer.tools.planner.search import (
    PlannedPlacement,
    PoolLayout,
    RoleLayout,
    Seconds,
    allocate,
    fit_together,
    partitions,
)
from verl_like.config_key import replace_keys
from verl_like.errors import ConfigError, PlacementError, join_few
from verl_like.placement.pools import expand_roles
from workers.memory import RoleMemory
from workers.models.causal_lm import recomputed_layers
from workers.parallel.pipeline import NoStages, num_chunks
from workers.parallel.sharding import ParallelDims, dims_of
from workers.training.model_parts import check_axes
from workers.training.role_model_spec import RoleModelSpec

SIZES = (2, 4, 8)
"""Sizes of a parallel axis that are tried."""
MIN_SAVED_S = 0.01
"""Seconds per step that a key must save to be worth changing."""
PLACEMENT_KEYS = ("placement", "resource_pool_spec", "role_mapping")
"""Keys that place roles, which the plan sets."""
LONG_ROW = 8192
"""Above this row length, splitting rows over ranks is tried even if every rank has rows."""
Keys = dict[str, Any]
"""Dotted keys and their values."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Job(ABC):
    """A configuration to plan, its settings, and the GPUs."""

    stages: ClassVar[tuple[str, ...]]
    """The stages of each step that use GPUs."""
    recipe: Recipe[Any]
    config: Any
    settings: Sequence[str]
    device: Device
    num_gpus: int
    per_node: int

    # ------------------------------------------------------------------ for a recipe to define

    @property
    @abstractmethod
    def describe_rows(self) -> str:
        """The data of a step in words."""

    @abstractmethod
    def rows(self, role: str) -> StepRows:
        """Return how many samples a call of the role has, and their lengths."""

    @abstractmethod
    def pass_tokens(self, config: Any, model: RoleModelSpec, role: str, method: str) -> int:
        """Return the tokens of a pass of this call."""

    @abstractmethod
    def smaller_passes(self, role: str) -> list[Keys]:
        """Return keys that make the passes of a trained model smaller, to try."""

    @abstractmethod
    def memories(self, config: Any) -> list[RoleMemory]:
        """Return the memory of all roles in this run, as the run computes it."""

    @abstractmethod
    def check_run(self, config: Any) -> None:
        """Raise if a check of the run rejects this configuration."""

    def models_in(self, config: Any) -> dict[str, RoleModelSpec]:
        """Return the model of every role that has one."""
        return role_models(config)

    def role_memory(self, config: Any, role: str, model: RoleModelSpec) -> RoleMemory:
        """Return the memory of the role in this run, as the run computes it."""
        return {memory.role: memory for memory in self.memories(config)}[role]

    @functools.cached_property
    def models(self) -> dict[str, RoleModelSpec]:
        """The model of every role that has one, as configured."""
        return self.models_in(self.config)

    @functools.cached_property
    def traced(self) -> tuple[Sequence[CallNode], str]:
        """The calls of a step, and a note if they are those of our class, as the user's fails."""
        cls = trainer_class(self.config)
        nodes, problem = trace_step(self.config, cls)
        if not problem:
            return nodes, ""
        ours = our_class(cls)
        nodes, problem_of_ours = trace_step(self.config, ours)
        if problem_of_ours:
            raise ConfigError(
                f"the plan does not know the calls of a step: the step failed on stubs in your "
                f"code, {join_few(own_code(self.config, ours))} ({problem_of_ours}). Plan with "
                "algorithm.adv_estimator=gae or grpo and the loss vanilla, which take as long."
            )
        return nodes, (
            f"note: the step of {cls.__name__} failed on stubs ({problem}), so the plan has the "
            f"calls of {ours.__name__}."
        )

    @property
    def nodes(self) -> Sequence[CallNode]:
        """The calls of a step."""
        return self.traced[0]

    def calls(self, role: str) -> Sequence[tuple[str, str]]:
        """Return (stage, method) of every call of the role with a batch in a step.

        A call in another stage than those of the plan counts as `update`. A reference on rows is
        called only before the first step.
        """
        nodes = [n for n in self.nodes if role in n.roles and n.samples and n.stage != "reference"]
        return [(n.stage if n.stage in self.stages else "update", n.method) for n in nodes]

    @property
    def roles(self) -> list[str]:
        """Roles that use GPUs."""
        return list(self.models)

    @property
    def least(self) -> tuple[float, ...]:
        """Seconds of the driver's own work per stage, which runs in parallel with the roles."""
        return ()

    # ------------------------------------------------------------------ placements

    @functools.cached_property
    def keys(self) -> set[str]:
        """Keys that the user has set."""
        return {setting.partition("=")[0].lstrip("+") for setting in self.settings}

    @functools.cached_property
    def costs(self) -> dict[str, ModelCost]:
        """Properties and records of every role's model, which determine its times."""
        gpus = Gpus(self.device, self.num_gpus, self.per_node)
        return {role: ModelCost.of(m, self.rows(role), gpus) for role, m in self.models.items()}

    def best(self, num_gpus: int) -> list[PlannedPlacement]:
        """Return the placements on a number of GPUs, fastest first.

        Each partition of the roles that fits has one placement. A single role has a placement for
        each layout that fits.
        """
        sizes = sizes_of(num_gpus, self.per_node)
        if len(self.roles) > 1:
            tried = (
                allocate(groups, sizes, num_gpus, self.lay_out, self.least)
                for groups in partitions(self.roles)
            )
            placements = [placement for placement in tried if placement is not None]
        else:
            placements = [
                PlannedPlacement((PoolLayout(size, (layout,)),))
                for size in sizes
                for layout in self.layouts(self.roles[0], size)
                if self.fits(layout)
            ]
        return sorted(placements, key=PlannedPlacement.by_speed)

    @functools.cache  # noqa: B019 - a job lives as long as its plan
    def lay_out(self, roles: tuple[str, ...], num_gpus: int) -> PoolLayout | None:
        """Return the plan of these roles on a pool of this size; None if they do not fit."""
        layouts, saved = self.sharing(roles, num_gpus)
        chosen = fit_together(self.device, layouts)
        return None if chosen is None else PoolLayout(num_gpus, chosen, saved)

    def sharing(
        self, roles: tuple[str, ...], num_gpus: int
    ) -> tuple[list[list[RoleLayout]], Seconds]:
        """Return the layouts of roles that share a pool, and the seconds per stage that it saves.

        Each role has its worthwhile layouts.
        """
        return [self.worthwhile(role, num_gpus) for role in roles], ()

    def fits(self, layout: RoleLayout) -> bool:
        """Return whether a GPU has room for the role by itself."""
        return fit_together(self.device, [[layout]]) is not None

    def overrides(self, placement: PlannedPlacement) -> list[str]:
        """Return the settings of this placement and its layouts."""
        pools = placement.pools
        keys = ["placement=colocate"] if len(pools) == 1 else []
        if len(pools) > 1:
            for pool in pools:
                name = f"{pool.roles[0]}_pool"
                keys.append(pool_key(name, pool.gpus, self.per_node))
                keys += [f"role_mapping.{role}={name}" for role in pool.roles]
        elif placement.gpus < self.num_gpus:
            keys.append(pool_key("global_pool", placement.gpus, self.per_node))
        return [*keys, *layout_keys(placement)]

    def configured(self, placement: PlannedPlacement) -> Any:
        """Return the configuration of a run with this placement."""
        cluster = cluster_keys(self.device, self.num_gpus, self.per_node)
        settings = [*self.settings, *overrides_of(cluster), *self.overrides(placement)]
        config, _ = compose.checked_config(settings, self.recipe)
        return config

    def rejection(self, placement: PlannedPlacement) -> str | None:
        """Return the error that a run with this placement would raise at its start, or None."""
        try:
            config = self.configured(placement)
            nominal_placement(config)
            self.check_run(config)
        except (ConfigError, PlacementError) as error:
            return str(error)
        return None

    def check(self) -> None:
        """Raise if the user places roles, or sets a tp, sp or pp that a model does not support."""
        placing = [key for key in self.keys if key.lstrip("~").split(".")[0] in PLACEMENT_KEYS]
        if placing:
            raise ConfigError(f"{placing[0]}: the plan chooses where roles run; leave the key out.")
        for role, model in self.models.items():
            axes = model.sharding
            self._check_axes(role, ParallelDims(tp=axes.tp, sp=axes.sp, pp=axes.pp))

    # ------------------------------------------------------------------ layouts of a role

    @functools.cache  # noqa: B019 - a job lives as long as its plan
    def worthwhile(self, role: str, num_gpus: int) -> list[RoleLayout]:
        """Return the layouts that no other layout beats (`RoleLayout.beats`)."""
        layouts = self.layouts(role, num_gpus)
        return [layout for layout in layouts if not any(other.beats(layout) for other in layouts)]

    @functools.cache  # noqa: B019 - a job lives as long as its plan
    def layouts(self, role: str, num_gpus: int) -> list[RoleLayout]:
        """Return the layouts to try of a model on these GPUs, including those that do not fit.

        Axes are tried one at a time. Pipeline stages wait for each other, so `pp` is tried only if
        no other layout fits.
        """
        axes: list[Keys] = [{}]
        has_axes = self.axes_are_tried(role)
        if has_axes:
            rows = self.rows(role)
            axes += self._sizes_of_axis(role, "tp")
            if rows.longest > LONG_ROW or rows.samples < rows.mini_batches * num_gpus:
                axes += self._sizes_of_axis(role, "sp")
            if self.costs[role].in_experts:
                axes += self._sizes_of_axis(role, "ep")
            if num_gpus > self.per_node:
                axes += self._sizes_of_axis(role, "shard", [self.per_node])
        candidates = list(self._layouts(role, num_gpus, axes))
        if has_axes and self.models[role].trains and not any(map(self.fits, candidates)):
            candidates += self._layouts(role, num_gpus, self._sizes_of_axis(role, "pp"))
        return candidates

    def _layouts(self, role: str, num_gpus: int, axes: Sequence[Keys]) -> Iterator[RoleLayout]:
        """Yield the layouts of a role on these GPUs, with seconds per stage and memory.

        Layouts that the model or the batch does not allow are left out.
        """
        gpus = Gpus(self.device, num_gpus, self.per_node)
        on_one_pool = {
            "resource_pool_spec": {"pool": _per_node(num_gpus, self.per_node)},
            "role_mapping": dict.fromkeys(expand_roles(self.config.role_mapping), "pool"),
        }
        for keys in self._choices(role, axes):
            config = replace_keys(self.config, on_one_pool | keys)
            model, calls, rows = self.models_in(config)[role], self.calls(role), self.rows(role)
            try:
                dims = dims_of(num_gpus, model.sharding)
                if dims.data_size > rows.samples or dims.tp * dims.sp > self.per_node:
                    continue
                self._check_axes(role, dims)
                memory = self.role_memory(config, role, model)
            except (ConfigError, NoStages):
                continue
            seconds = dict.fromkeys(self.stages, 0.0)
            for stage, method in calls:
                seconds[stage] += len(keys) * MIN_SAVED_S / len(calls)
                seconds[stage] += pass_seconds(
                    self.costs[role],
                    rows,
                    dims,
                    self.pass_tokens(config, model, role, method),
                    gpus,
                    trains=method.startswith("update_"),
                    recomputed=recomputed_layers(model.model, "cuda", can_recompute=True),
                    offloads=model.sharding.param_offload,
                    num_stages=num_chunks(model.sharding.pp_schedule),
                )
            words = {key: str(value).lower() for key, value in keys.items()}
            yield RoleLayout(role, tuple(seconds.values()), memory, words)

    def _choices(self, role: str, axes: Sequence[Keys]) -> Iterator[Keys]:
        """Yield the keys of every layout to try; the user's keys keep their values."""
        model = self.models[role]
        recompute = f"{model.key.removesuffix('.path')}.enable_gradient_checkpointing"
        fsdp = f"{model.section or model.key.removesuffix('.path')}.fsdp_config"
        offload = {f"{fsdp}.param_offload": True, f"{fsdp}.optimizer_offload": True}
        changes = [axes]
        if model.trains:
            changes += [[{}, *self.smaller_passes(role)], [{}, {recompute: False}], [{}, offload]]
        free = [[keys for keys in of_kind if not self.keys & keys.keys()] for of_kind in changes]
        for combination in product(*free):
            yield {key: value for keys in combination for key, value in keys.items()}

    def axes_are_tried(self, role: str) -> bool:
        """Return whether the role's axes are searched."""
        model = self.models[role]
        return model.parallel is not None and not model.quantization

    def _sizes_of_axis(self, role: str, axis: str, sizes: Sequence[int] = SIZES) -> list[Keys]:
        return [{f"{self.models[role].axes_key}.{axis}": size} for size in sizes]

    @functools.cache  # noqa: B019 - a job lives as long as its plan
    def _axes_error(self, role: str, dims: ParallelDims) -> ConfigError | None:
        """Return the model's error for these axes; None if they are supported."""
        model = self.models[role]
        schedule = model.sharding.pp_schedule
        try:
            check_axes(model.meta_module, model.model, dims, model.axes_key, schedule)
        except ConfigError as error:
            return error
        return None

    def _check_axes(self, role: str, dims: ParallelDims) -> None:
        """Raise if the model does not support these axes."""
        shard = dims.shard if dims.ep > 1 else 1
        of_model = ParallelDims(tp=dims.tp, sp=dims.sp, pp=dims.pp, ep=dims.ep, shard=shard)
        error = None if of_model == ParallelDims() else self._axes_error(role, of_model)
        if error is not None:
            raise error


@dataclass(frozen=True, eq=False, kw_only=True)
class RowsJob(Job):
    """A run that trains one model on rows: SFT, reward model or DPO."""

    stages: ClassVar[tuple[str, ...]] = ("update",)
    config: RowConfig
    lengths: Sequence[float]
    """Tokens of rows that are equally likely, the longest last."""

    @property
    def describe_rows(self) -> str:
        """Rows and their lengths in words."""
        sides = "pairs" if self.config.num_sides == 2 else "rows"
        mean = sum(self.lengths) / len(self.lengths)
        return (
            f"{self.config.data.train_batch_size:,} {sides} of {mean:g} tokens per row on average "
            f"(at most {longest_row(self.config):,})"
        )

    def rows(self, role: str) -> StepRows:
        """Return the rows of a step."""
        samples = self.config.data.train_batch_size * self.config.num_sides
        return StepRows(
            samples=samples,
            prompts=0,
            prompt=0.0,
            responses=self.lengths,
            longest=longest_row(self.config),
        )

    def pass_tokens(self, config: RowConfig, model: RoleModelSpec, role: str, method: str) -> int:
        """Return the tokens of a pass of this call."""
        return pass_tokens(config, longest_row(self.config))

    def smaller_passes(self, role: str) -> list[Keys]:
        """Return keys that make the passes of a trained model smaller, to try."""
        data, key, fewest = self.config.data, "micro_batch_size_per_gpu", 1
        if data.use_dynamic_bsz:
            key, fewest = "max_token_len_per_gpu", self.config.num_sides * longest_row(self.config)
        now = getattr(data, key)
        sizes = {max(now // 4, fewest), fewest} - {now}
        return [{f"data.{key}": size} for size in sizes]

    def memories(self, config: RowConfig) -> list[RoleMemory]:
        """Return the memory of all roles in this run, as the run computes it."""
        return role_memories(config, "cuda")

    def check_run(self, config: RowConfig) -> None:
        """Raise the errors of models and memory that the run would raise at its start."""
        preflight(config)

    def axes_are_tried(self, role: str) -> bool:
        """Return whether axes are searched; axes that a reference shares stay unchanged."""
        return len(self.models) == 1 and super().axes_are_tried(role)


def _per_node(num_gpus: int, per_node: int) -> list[int]:
    """Return the GPUs of a pool on each of its nodes."""
    on_node = min(num_gpus, per_node)
    return [on_node] * (num_gpus // on_node)


def cluster_keys(device: Device, num_gpus: int, per_node: int) -> dict[str, Any]:
    """Return the settings of a run that simulates these GPUs."""
    on_node = min(num_gpus, per_node)
    is_known = GIB_OF_GPUS.get(device.name) == device.memory_gib
    gpu = device.name if is_known else f"{device.memory_gib:g}GiB"
    return {
        "trainer.simulate": f"{num_gpus}x{gpu}",
        "trainer.nnodes": num_gpus // on_node,
        "trainer.n_gpus_per_node": on_node,
    }


def sizes_of(num_gpus: int, per_node: int) -> list[int]:
    """Return the sizes of pools to try: powers of two in a node, and whole nodes.

    Of more than eight nodes, only 2^k and 3 x 2^k nodes and all nodes are tried.
    """
    nodes = num_gpus // per_node
    few_factors = {factor << power for factor in (1, 3) for power in range(nodes.bit_length())}
    of_nodes = [n for n in range(1, nodes + 1) if nodes <= 8 or n == nodes or n in few_factors]
    in_node = [n for n in (1, 2, 4, 8, 16) if n <= min(num_gpus, per_node)]
    return sorted({*in_node, min(num_gpus, per_node), *(per_node * n for n in of_nodes)})


def pool_key(name: str, gpus: int, per_node: int) -> str:
    """Return the override of a pool's size."""
    return f"resource_pool_spec.{name}={_per_node(gpus, per_node)}".replace(" ", "")


def layout_keys(placement: PlannedPlacement) -> list[str]:
    """Return the overrides of all layouts."""
    layouts = [layout for pool in placement.pools for layout in pool.layouts]
    return [f"{key}={value}" for layout in layouts for key, value in layout.keys.items()]
