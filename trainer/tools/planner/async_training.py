"""Plan asynchronous runs on GPUs: the trainer's GPUs, and the generators.

The trainer's roles share one pool, and all generators have the same size. Generators and trainer
work at the same time, so a step takes as long as the slower side.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from trainer.async_training.config import AsyncConfig
from trainer.async_training.topology import TRAINER_POOL, generator_pool
from trainer.tools.planner.cost import Gpus
from trainer.tools.planner.job import layout_keys, pool_key, sizes_of
from trainer.tools.planner.ppo import PPOJob
from trainer.tools.planner.search import PlannedPlacement, PoolLayout
from verl_like.config_key import replace_keys
from verl_like.errors import ConfigError

NUMS_OF_GENERATORS = (1, 2, 4, 8)


@dataclass(frozen=True)
class AsyncPlacement(PlannedPlacement):
    """A pool that trains, and generators."""

    num_generators: int = 1
    overlaps: bool = True
    """False if `max_staleness` is 0: then the sides take turns."""
    generation: float = 0.0
    """Seconds in which all generators generate a batch and load weights."""
    training: float = 0.0
    """Seconds in which the trainer scores a batch and updates."""

    @property
    def step(self) -> float:
        """Seconds of a step."""
        both = self.generation, self.training
        return max(both) if self.overlaps else sum(both)

    @property
    def gpus(self) -> int:
        """GPUs of the trainer and of all generators."""
        trainer, generator = self.pools
        return trainer.gpus + self.num_generators * generator.gpus

    @property
    def summary(self) -> str:
        """Roles and GPUs of the trainer and of each generator."""
        trainer, generator = self.pools
        generators = self.num_generators
        engines = f"generator on {generator.gpus}"
        if generators > 1:
            engines = f"{generators} generators on {generator.gpus} each"
        return f"{' + '.join(trainer.roles)} on {trainer.gpus} | {engines}"

    def limit(self, stages: Sequence[str]) -> str:
        """Return the slower side, by its share of both."""
        sides = {"generators": self.generation, "trainer": self.training}
        slower = max(sides, key=lambda name: sides[name])
        return f"{slower} {sides[slower] / sum(sides.values()):.0%}"


@dataclass(frozen=True, eq=False, kw_only=True)
class AsyncJob(PPOJob):
    """A run that generates samples while it trains."""

    config: AsyncConfig

    def check(self) -> None:
        """Raise for runs that cannot be planned, and for axes that do not fit a model."""
        if self.config.async_training.score_on == "generator":
            raise ConfigError(
                "async_training.score_on=generator cannot be planned: the plan counts scoring on "
                "the trainer's GPUs. Leave out this key."
            )
        super().check()

    def best(self, num_gpus: int) -> list[PlannedPlacement]:
        """Return the splits into trainer and generators, fastest first."""
        return sorted(self._splits(num_gpus), key=PlannedPlacement.by_speed)

    def _splits(self, num_gpus: int) -> Iterator[AsyncPlacement]:
        """Yield the placements with each number of trainer GPUs and of generators that fits."""
        sizes, prompts = sizes_of(num_gpus, self.per_node), self.config.data.train_batch_size
        async_training = self.config.async_training
        on_trainer = tuple(role for role in self.roles if self.config.kind_of(role) != "rollout")
        has_generators = self.keys & {"async_training.generators", "async_training.topology"}
        has_trainers = "async_training.trainers" in self.keys
        for trainers in [async_training.trainers] if has_trainers else sizes[:-1]:
            for num_generators in (
                [async_training.generators] if has_generators else NUMS_OF_GENERATORS
            ):
                sizes_of_generator = [n for n in sizes if n * num_generators <= num_gpus - trainers]
                if not sizes_of_generator or prompts % max(trainers, num_generators):
                    continue
                trainer = self.lay_out(on_trainer, trainers)
                generator = self.lay_out(("rollout",), sizes_of_generator[-1])
                if trainer is not None and generator is not None:
                    yield self._placed(trainer, generator, num_generators)

    def _placed(
        self, trainer: PoolLayout, generator: PoolLayout, num_generators: int
    ) -> AsyncPlacement:
        """Return the placement, with the seconds of its two sides."""
        sizes = {"generators": num_generators, "trainers": trainer.gpus}
        config = replace_keys(self.config, {f"async_training.{key}": n for key, n in sizes.items()})
        num_chunks = config.data.train_batch_size // config.chunk_size
        at_once = min(map(config.chunks_in_parallel, range(num_generators)))
        chunks = max(num_chunks // at_once, 1)
        gen, _, _, sync = generator.seconds
        gen = self._chunk_seconds(generator, chunks) * chunks / num_generators
        _, score, update, _ = trainer.seconds
        (layout,) = generator.layouts
        shown = replace(generator, layouts=(replace(layout, seconds=(gen, 0.0, 0.0, sync)),))
        return AsyncPlacement(
            (trainer, shown),
            self.least,
            num_generators,
            overlaps=config.async_training.max_staleness > 0,
            generation=gen + sync,
            training=score + self.rewards + update,
        )

    def _chunk_seconds(self, generator: PoolLayout, chunks: int) -> float:
        """Return the seconds of a chunk on a generator's GPUs."""
        rows = self.rows("rollout")
        prompts, samples = (-(-number // chunks) for number in (rows.prompts, rows.samples))
        gpus = Gpus(self.device, generator.gpus, self.per_node)
        engines = self.engines("rollout", gpus, replace(rows, prompts=prompts, samples=samples))
        return next(
            engine.seconds[0] for engine in engines if engine.keys == generator.layouts[0].keys
        )

    def overrides(self, placement: PlannedPlacement) -> list[str]:
        """Return the keys of generators, trainers, their pools and their layouts."""
        assert isinstance(placement, AsyncPlacement), "this job finds no others"
        trainer, generator = placement.pools
        generators = placement.num_generators
        return [
            f"async_training.generators={generators}",
            f"async_training.trainers={trainer.gpus}",
            pool_key(TRAINER_POOL, trainer.gpus, self.per_node),
            *(
                pool_key(generator_pool(n), generator.gpus, self.per_node)
                for n in range(generators)
            ),
            *layout_keys(placement),
        ]
