"""Plan detached runs on GPUs: the GPUs that train, and the makers that generate.

The trainer's roles share one pool, and all makers are alike. The seconds of a step are simulated
from the seconds of its phases (`trainer.planner.simulate`).
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from trainer.config.recipe import Recipe
from trainer.detached.config import DetachedConfig
from trainer.detached.recipe import DETACHED
from trainer.detached.topology import TRAINER_POOL, maker_pool
from trainer.planner.cost import Gpus
from trainer.planner.job import layout_keys, pool_key, sizes_of
from trainer.planner.ppo import PPOJob
from trainer.planner.prediction import setup_of
from trainer.planner.search import PlannedPlacement, PoolPlan
from trainer.planner.simulate import Phases, Setup, simulate, what_limits
from verl_like.errors import ConfigError

NUM_STEPS = 30
"""Steps of a simulation: enough that the first steps, without overlap, count little."""
NUMS_OF_MAKERS = (1, 2, 4, 8)


@dataclass(frozen=True)
class DetachedPlacement(PlannedPlacement):
    """A pool that trains, and makers."""

    phases: Phases = Phases([0.0], [0.0], [0.0])
    setup: Setup = Setup()

    @functools.cached_property
    def step(self) -> float:
        """Simulated seconds of a step."""
        return simulate(self.phases, self.setup, NUM_STEPS).seconds

    @property
    def gpus(self) -> int:
        """GPUs of the trainer and of all makers."""
        trainer, maker = self.pools
        return trainer.gpus + self.setup.num_makers * maker.gpus

    @property
    def in_words(self) -> str:
        """Roles and GPUs of the trainer and of each maker."""
        trainer, maker = self.pools
        makers = self.setup.num_makers
        each = f"{makers} makers on {maker.gpus} each" if makers > 1 else f"maker on {maker.gpus}"
        return f"{' + '.join(trainer.roles)} on {trainer.gpus} | {each}"

    @property
    def partition(self) -> Hashable:
        """The number of training GPUs and the number of makers."""
        return self.pools[0].gpus, self.setup.num_makers

    def limit(self, stages: Sequence[str]) -> str:
        """Return the role that limits the speed of a step most."""
        return what_limits(self.phases, self.setup)


@dataclass(frozen=True, eq=False, kw_only=True)
class DetachedJob(PPOJob):
    """A run that generates samples while it trains."""

    recipe: ClassVar[Recipe[Any]] = DETACHED
    config: DetachedConfig

    @functools.cached_property
    def trainer_roles(self) -> tuple[str, ...]:
        """Roles that share the trainer's GPUs."""
        return tuple(role for role in self.roles if self.config.kind_of(role) != "rollout")

    def check(self) -> None:
        """Raise for runs that cannot be planned, and for axes that do not fit a model."""
        if self.config.detached.score_on == "maker":
            raise ConfigError(
                "detached.score_on=maker is not planned: seconds of scores are counted on the "
                "trainer's GPUs. Leave it out to plan."
            )
        super().check()

    def best(self, num_gpus: int) -> list[PlannedPlacement]:
        """Return the splits into trainer and makers, fastest first."""
        return sorted(self._splits(num_gpus), key=PlannedPlacement.by_speed)

    def _splits(self, num_gpus: int) -> Iterator[DetachedPlacement]:
        sizes, prompts = sizes_of(num_gpus, self.per_node), self.config.data.train_batch_size
        detached = self.config.detached
        has_makers = self.keys & {"detached.makers", "detached.topology"}
        has_trainers = "detached.trainers" in self.keys
        for trainers in [detached.trainers] if has_trainers else sizes[:-1]:
            for num_makers in [detached.makers] if has_makers else NUMS_OF_MAKERS:
                sizes_of_maker = [n for n in sizes if n * num_makers <= num_gpus - trainers]
                if not sizes_of_maker or prompts % max(trainers, num_makers):
                    continue
                trainer = self.lay_out(self.trainer_roles, trainers)
                maker = self.lay_out(("rollout",), sizes_of_maker[-1])
                if trainer is not None and maker is not None:
                    yield self._placed(trainer, maker, num_makers)

    def _placed(self, trainer: PoolPlan, maker: PoolPlan, num_makers: int) -> DetachedPlacement:
        """Return the placement with the phases of a step, which the makers divide into pieces."""
        detached = replace(self.config.detached, makers=num_makers, trainers=trainer.gpus)
        setup = setup_of(replace(self.config, detached=detached))
        gen, _, _, sync = maker.seconds
        (layout,), pieces = maker.layouts, setup.num_pieces
        if pieces > 1:
            fixed = (self._piece_seconds(maker, pieces) / gen - 1 / pieces) / (1 - 1 / pieces)
            setup = replace(setup, fixed_share=min(max(fixed, 0.0), 1.0))
        _, score, update, _ = trainer.seconds
        phases = Phases([gen], [score + self.rewards], [update], [sync])
        share = setup.fixed_share + (1 - setup.fixed_share) / pieces
        seconds = (gen * share * pieces / num_makers, 0.0, 0.0, sync)
        shown = replace(maker, layouts=(replace(layout, seconds=seconds),))
        return DetachedPlacement((trainer, shown), self.least, phases, setup)

    def _piece_seconds(self, maker: PoolPlan, pieces: int) -> float:
        """Return the seconds of a piece on a maker's GPUs."""
        rows = self.rows("rollout")
        prompts, samples = (-(-number // pieces) for number in (rows.prompts, rows.samples))
        gpus = Gpus(self.device, maker.gpus, self.per_node)
        engines = self.engines("rollout", gpus, replace(rows, prompts=prompts, samples=samples))
        return next(each.seconds[0] for each in engines if each.keys == maker.layouts[0].keys)

    def overrides(self, placement: PlannedPlacement) -> list[str]:
        """Return the keys of makers, trainers and their pools."""
        assert isinstance(placement, DetachedPlacement), "this job finds no others"
        trainer, maker = placement.pools
        makers = placement.setup.num_makers
        return [
            f"detached.makers={makers}",
            f"detached.trainers={trainer.gpus}",
            pool_key(TRAINER_POOL, trainer.gpus, self.per_node),
            *(pool_key(maker_pool(n), maker.gpus, self.per_node) for n in range(makers)),
            *layout_keys(placement),
        ]
