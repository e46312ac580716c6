"""Which layouts work with which other features of a run; `docs/parallel.md` summarizes it.

`test_axes_together.py` runs every cell. If it works, it must give the numbers of one process; if it
is rejected, the error must come before a process starts.
"""

from __future__ import annotations

from typing import NamedTuple


class Layout(NamedTuple):
    """Parallel axes of the role's ranks."""

    num_ranks: int
    axes: tuple[str, ...]
    model: str = "dense"
    """The test's model: "experts" for layouts that distribute experts."""


class Feature(NamedTuple):
    """A feature of the run in addition to the layout."""

    recipe: str
    settings: tuple[str, ...] = ()
    """With {tiny}, {model}, {classifier}, {rows}, {pairs}, and {num_ranks}."""
    sections: tuple[str, ...] = ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic")
    """The sections that get the layout; "" is the section of a recipe on rows."""


LAYOUTS = {
    "replicate x sp": Layout(4, ("shard=1", "sp=2")),
    "shard x sp": Layout(4, ("shard=2", "sp=2")),
    "shard x tp": Layout(4, ("shard=2", "tp=2")),
    "sp x tp": Layout(4, ("sp=2", "tp=2")),
    "ep x sp": Layout(2, ("ep=2", "sp=2"), "experts"),
    "ep x shard": Layout(4, ("ep=2", "shard=4"), "experts"),
    "tp x pp": Layout(4, ("tp=2", "pp=2")),
    "shard x pp": Layout(4, ("shard=2", "pp=2")),
    "sp x pp": Layout(4, ("sp=2", "pp=2")),
    "ep x pp": Layout(4, ("ep=2", "shard=2", "pp=2"), "experts"),
    "ep x tp": Layout(2, ("ep=2", "tp=2"), "experts"),
}
BOTH = ("actor_rollout_ref.actor", "critic")
ROWS = ("",)
REF_IN_INT8 = "actor_rollout_ref.ref.quantization=int8"
LORA = "actor_rollout_ref.model.lora_rank=4", "critic.model.lora_rank=4"
AVERAGED = "actor_rollout_ref.actor.ema_decay=0.5", "data.val_files={tiny}/val.parquet"
CLASSIFIER = "reward.model.enable=true", "reward.model.path={classifier}"
GENERATORS = "async_training.topology=2m{num_ranks}t", "async_training.max_staleness=0"
FEATURES = {
    "actor, reference, critic": Feature("ppo"),
    "LoRA": Feature("ppo", LORA, sections=BOTH),
    "moving average (`ema_decay`)": Feature("ppo", (*AVERAGED, "trainer.test_freq=1")),
    "offloading": Feature(
        "ppo", ("role_workers.actor=tests.integration.offloading.OffloadingActor",)
    ),
    "int8 reference on such ranks": Feature("ppo", (REF_IN_INT8,)),
    "int8 reference, whole on each": Feature("ppo", (REF_IN_INT8,), sections=BOTH),
    "reward model that scores": Feature("ppo", CLASSIFIER),
    "generators (`async`)": Feature("async", GENERATORS),
    "generators that score": Feature(
        "async", (*GENERATORS, "async_training.score_on=generator"), sections=BOTH
    ),
    "`sft`": Feature("sft", ("data.train_files={rows}",), ROWS),
    "`sft` with LoRA": Feature("sft", ("data.train_files={rows}", "model.lora_rank=4"), ROWS),
    "`dpo`": Feature("dpo", ("data.train_files={pairs}",), ROWS),
    "`dpo` with a reference of its own": Feature(
        "dpo", ("data.train_files={pairs}", "ref.model.path={model}"), ROWS
    ),
    "`reward-model`": Feature("reward_model", ("data.train_files={pairs}",), ROWS),
}
ERRORS = {
    ("", "ep x tp"): "Set one of them to 1",
    ("int8 reference on such ranks", "ep x tp"): "tp=2 splits linear layers",
    ("int8 reference on such ranks", "shard x sp"): "parallel.shard=2. Set ",
    ("int8 reference on such ranks", "shard x tp"): "tp=2 splits linear layers",
    ("int8 reference on such ranks", "sp x tp"): "tp=2 splits linear layers",
    ("int8 reference on such ranks", "tp x pp"): "tp=2 splits linear layers",
    ("int8 reference on such ranks", "shard x pp"): "pp=2 gives every rank only some layers",
    ("int8 reference on such ranks", "sp x pp"): "pp=2 gives every rank only some layers",
    ("int8 reference on such ranks", "ep x pp"): "pp=2 gives every rank only some layers",
    ("int8 reference on such ranks", "ep x sp"): "ep=2 distributes the experts",
    ("int8 reference on such ranks", "ep x shard"): "parallel.shard=4. Set ",
}
"""(feature, layout) -> text of the error; "" stands for every feature."""


def error_of(feature: str, layout: str) -> str:
    """Return the error text of a rejected cell; "" if the cell works."""
    return ERRORS.get((feature, layout), ERRORS.get(("", layout), ""))
