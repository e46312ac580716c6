"""Detached runs on cards: how many train, how many generate, in how many makers.

The roles of the trainer share one pool; makers are alike. What a step takes is simulated from the
seconds of its phases (`trainer.planner.simulate`).
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from trainer.config.recipe import Recipe
from trainer.detached.config import DetachedConfig
from trainer.detached.plan import setup_of
from trainer.detached.recipe import DETACHED
from trainer.detached.topology import TRAINER_POOL, maker_pool
from trainer.planner.cost import Cards
from trainer.planner.job import PLACING, layout_keys, pool_key, sizes_of
from trainer.planner.layouts import PPOJob
from trainer.planner.search import Option, Placement, Pool
from trainer.planner.simulate import Phases, Setup, simulate, what_limits
from verl_like.errors import ConfigError

NUM_STEPS = 30
"""Of a simulation: the first ones, which nothing runs beside, count for little then."""
MOST_SIMULATED = 8
"""Times as many as are asked for, of those that could be fastest: the others are left out."""
NUMS_OF_MAKERS = (1, 2, 4, 8)


@dataclass(frozen=True)
class DetachedPlacement(Placement):
    """A pool that trains, and makers beside it."""

    phases: Phases = Phases([0.0], [0.0], [0.0])
    setup: Setup = Setup()

    @functools.cached_property
    def step(self) -> float:
        """Seconds, simulated."""
        return simulate(self.phases, self.setup, NUM_STEPS).seconds

    @property
    def at_least(self) -> float:
        """Seconds below which no pacing brings a step."""
        gen, *trainer = self.seconds[:-1]
        return max(gen, sum(trainer))

    @property
    def cards(self) -> int:
        """Of the trainer and of all makers."""
        trainer, maker = self.pools
        return trainer.cards + self.setup.num_makers * maker.cards

    @property
    def in_words(self) -> str:
        """Roles and cards of the trainer and of each maker."""
        trainer, maker = self.pools
        makers = self.setup.num_makers
        each = f"{makers} makers on {maker.cards} each" if makers > 1 else f"maker on {maker.cards}"
        return f"{' + '.join(trainer.roles)} on {trainer.cards} | {each}"

    @property
    def shares(self) -> Hashable:
        """How many cards train, and how many makers there are."""
        return self.pools[0].cards, self.setup.num_makers

    def limit(self, stages: Sequence[str]) -> str:
        """Whose speed a step depends on most."""
        return what_limits(self.phases, self.setup)


@dataclass(frozen=True, eq=False, kw_only=True)
class DetachedJob(PPOJob):
    """A run whose samples are made beside the training."""

    recipe: ClassVar[Recipe[Any]] = DETACHED
    config: DetachedConfig

    @functools.cached_property
    def trainer_roles(self) -> tuple[str, ...]:
        """Those that share the trainer's cards."""
        return tuple(role for role in self.roles if self.config.kind_of(role) != "rollout")

    def check(self) -> None:
        """Refuse what is not counted, and axes of the user's that a model cannot have."""
        if self.config.detached.score_on == "maker":
            raise ConfigError(
                "detached.score_on=maker is not planned: seconds of scores are counted on the "
                "trainer's cards. Leave it out to plan."
            )
        if self.own_pools:
            raise ConfigError(
                "A detached run places its roles by detached.makers and detached.trainers: set "
                f"them, and leave {', '.join(PLACING)} out to plan."
            )
        super().check()

    def best(self, num_cards: int, count: int) -> list[Placement]:
        """The fastest splits into trainer and makers."""
        found = sorted(self._splits(num_cards), key=lambda each: each.at_least)
        found = sorted(found[: MOST_SIMULATED * count], key=lambda each: each.step)
        fastest: dict[Hashable, Placement] = {}
        for placement in found:
            fastest.setdefault(placement.shares, placement)
        return list(fastest.values())

    def _splits(self, num_cards: int) -> Iterator[DetachedPlacement]:
        sizes, prompts = sizes_of(num_cards, self.per_node), self.config.data.train_batch_size
        for trainers in self.may("detached.trainers", self.config.detached.trainers, sizes[:-1]):
            for num_makers in self.may_have_makers():
                fitting = [n for n in sizes if n * num_makers <= num_cards - trainers]
                if not fitting or prompts % max(trainers, num_makers):
                    continue
                for trainer in self.search.pools(self.trainer_roles, trainers):
                    for maker in self.search.pools(("rollout",), fitting[-1]):
                        yield self._placed(trainer, maker, num_makers)

    def may_have_makers(self) -> list[int]:
        """Numbers of makers that are tried."""
        if self.keys & {"detached.makers", "detached.topology"}:
            return [self.config.detached.makers]
        return list(NUMS_OF_MAKERS)

    def _placed(self, trainer: Pool, maker: Pool, num_makers: int) -> DetachedPlacement:
        """With the phases of a step, of which a maker makes a part of the rows at a time."""
        setup = self._setup(num_makers, trainer.cards)
        gen, _, _, sync = maker.seconds
        (option,), pieces = maker.options, setup.num_pieces
        piece = next(
            each.seconds[0]
            for each in self._of_pieces(maker.cards, pieces)
            if each.keys == option.keys
        )
        fixed = 0.0 if pieces == 1 else (piece / gen - 1 / pieces) / (1 - 1 / pieces)
        setup = replace(setup, fixed_share=min(max(fixed, 0.0), 1.0))
        _, score, update, _ = trainer.seconds
        phases = Phases([gen], [score + self.rewards], [update], [sync])
        made = gen * (setup.fixed_share + (1 - setup.fixed_share) / pieces) * pieces / num_makers
        shown = Pool(maker.cards, (replace(option, seconds=(made, 0.0, 0.0, sync)),))
        return DetachedPlacement((trainer, shown), self.least, phases, setup)

    @functools.cache  # noqa: B019 - a job lives as long as its plan
    def _of_pieces(self, cards: int, pieces: int) -> list[Option]:
        """The layouts of a maker, with the seconds of a piece."""
        rows = self.rows("rollout")
        prompts, samples = (-(-number // pieces) for number in (rows.prompts, rows.samples))
        of_piece = replace(rows, prompts=prompts, samples=samples)
        on = Cards(self.device, cards, self.per_node)
        return list(self.engines("rollout", on, of_piece))

    @functools.cache  # noqa: B019 - a job lives as long as its plan
    def _setup(self, makers: int, trainers: int) -> Setup:
        detached = replace(self.config.detached, makers=makers, trainers=trainers)
        return setup_of(replace(self.config, detached=detached))

    def overrides(self, placement: Placement) -> list[str]:
        """The keys of makers, trainers and their pools."""
        assert isinstance(placement, DetachedPlacement), "this job finds no others"
        trainer, maker = placement.pools
        makers = placement.setup.num_makers
        return [
            f"detached.makers={makers}",
            f"detached.trainers={trainer.cards}",
            pool_key(TRAINER_POOL, trainer.cards, self.per_node),
            *(pool_key(maker_pool(n), maker.cards, self.per_node) for n in range(makers)),
            *layout_keys(placement),
        ]
