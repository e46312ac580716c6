"""Check the rules that fields declare: range, choices, required values.

A recipe has the rules between its fields (`Recipe.checks`); the rules between the keys of every run
are here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainer.config.keys import (
    KINDS,
    Arguments,
    Key,
    keys_by_name,
    leaves_of,
    leaves_of_items,
)
from trainer.config.schema import RunConfig
from verl_like.errors import ConfigError, nearest
from verl_like.placement.pools import ResourcePool, expand_roles
from verl_like.registry import get_registry
from workers.parallel.sharding import Sharding, dims_of

if TYPE_CHECKING:
    from workers.training.role_model_spec import RoleModelSpec


def check_fields(config: RunConfig) -> None:
    """Reject a value that its field does not allow."""
    fields = [*leaves_of(config), *leaves_of_items(config)]
    required = [
        key for key, section in fields if key.rules.required and not getattr(section, key.leaf)
    ]
    if required:
        raise ConfigError(
            "\n".join(f"{key.name} is empty: {key.rules.required}." for key in required)
        )
    for key, section in fields:
        value = getattr(section, key.leaf)
        check_value(key, value)
        if key.rules.arguments_of:
            _check_arguments(key, value, Arguments.of(key, section))


def check_value(key: Key, value: Any) -> None:
    """Reject a value that is unregistered, not among the choices, or out of range."""
    rules, hint = key.rules, f", {key.rules.hint}." if key.rules.hint else "."
    if value != value:
        raise ConfigError(f"{key.name}={value}: it must be a number.")
    if value is None:
        return
    for name in value if isinstance(value, list) else [value]:
        if (rules.registry or rules.choices) and isinstance(name, list | dict):
            raise ConfigError(f"{key.name}={value}: {name} is not a name. Write names.")
        if rules.registry:
            try:
                get_registry(rules.registry).look_up(name)
            except ConfigError as err:
                remedy = f" {rules.hint}" if rules.hint else ""
                raise ConfigError(f"{key.name}={name}: {err}{remedy}") from err
        if rules.choices and name not in rules.choices:
            words = ", ".join(rules.choices)
            words = " or ".join(rules.choices) if len(rules.choices) == 2 else f"one of {words}"
            near = nearest(name, rules.choices)
            if name in rules.elsewhere:
                near = f" {name} is called {rules.elsewhere[name]} here."
            raise ConfigError(f"{key.name}={name}: choose {words}{hint}{near}")
    within = all(allows(value, limit) for _, allows, limit in key.bounds)
    if not within and value != rules.or_exactly:
        raise ConfigError(f"{key.name}={value}: it must be {key.range}{hint}")
    if rules.options is not None:
        for name, option in value.items():
            try:
                OmegaConf.merge(OmegaConf.structured(rules.options), {name: option})
            except OmegaConfBaseException as err:
                from trainer.config.key_errors import takes

                allowed = takes(keys_by_name(rules.options)[name])
                raise ConfigError(f"{key.name}.{name}={option}: it {allowed}.") from err


def _check_arguments(key: Key, values: Mapping[str, Any], arguments: Arguments) -> None:
    """Reject arguments that no entry of the registry takes, and values that the entry rejects."""
    taken, known = arguments.taken, arguments.known
    for name, value in values.items():
        if name not in taken and name not in known:
            raise ConfigError(
                f"there is no key '{key.name}.{name}'. The {arguments.kind} of this run accepts "
                f"{', '.join(taken) or 'no arguments'}.{nearest(name, [*taken, *known])}"
            )
        if name in taken:
            kind = taken[name].kind
            if kind in KINDS and not _is_of_kind(value, kind):
                raise ConfigError(f"{key.name}.{name}={value}: it takes {KINDS[kind]}.")
            check_value(taken[name], value)


def _is_of_kind(value: Any, kind: type) -> bool:
    if isinstance(value, bool) or kind is bool:
        return kind is bool and isinstance(value, bool)
    return isinstance(value, (int, float) if kind is float else kind)


def check_ranks(config: RunConfig, role: str, sharding: Sharding) -> None:
    """Reject a sharding that does not fit the ranks of the role's pool."""
    pool, ranks = _pool_of(config, role)
    if ranks == 0:
        return  # the placement reports the error of such a pool
    try:
        dims_of(ranks, sharding)
    except ConfigError as error:
        raise ConfigError(f"role {role!r} on pool {pool!r}: {error}") from error


def _pool_of(config: RunConfig, role: str) -> tuple[str, int]:
    """Return a role's pool and its number of ranks."""
    pool = expand_roles(config.role_mapping).get(role, "")
    return pool, sum(config.resource_pool_spec.get(pool, []))


def check_class_of(role: str, model: RoleModelSpec) -> None:
    """Reject a model whose files lack weights of its class, or that no pass computes correctly."""
    from workers.models.load import check_files
    from workers.models.support import Support
    from workers.training.passes.row_layout import row_kind  # slow: imports the engine, about 1 s

    attention = "eager" if model.model.attn_implementation == "eager" else ""  # the class's own
    try:
        check_files(model.meta_module, model.model, model.head)
        support = Support.of(model.meta_module.config, attention)
        row_kind(support, model.model.use_remove_padding)
    except ConfigError as error:
        raise ConfigError(f"role {role!r}: {error}") from error


def check_axes_of(config: RunConfig, role: str, model: RoleModelSpec) -> None:
    """Reject a model that cannot start, and axes over which it cannot be split."""
    _, ranks = _pool_of(config, role)
    if ranks == 0:
        return
    if config.trainer.simulate is None:
        check_class_of(role, model)
    try:
        sharding = model.sharding
        dims = dims_of(ranks, sharding)
        if max(dims.sp, dims.tp, dims.pp, dims.ep) > 1:
            from workers.training.model_parts import (
                check_axes,  # slow: imports the engine, about 1 s
            )

            schedule = sharding.pp_schedule
            check_axes(model.meta_module, model.model, dims, model.axes_key, schedule)
    except ConfigError as error:
        raise ConfigError(f"role {role!r}: {error}") from error


def check_reads_images(models: Mapping[str, RoleModelSpec]) -> None:
    """Reject models that cannot read the images in the rows of this run, or not on these axes."""
    from workers.models.causal_lm import body_reads_images
    from workers.models.folder import model_folder, shared_hf_config
    from workers.models.images import why_no_images

    for role, model in models.items():
        path = model.model.path
        config = shared_hf_config(model_folder(path, weights=False))
        reason = why_no_images(config)
        if reason:
            raise ConfigError(
                f"role {role!r}: {model.key}={path}: {reason}, but the rows of this run have "
                "images, or environment.images=true. Use a vision-language model of docs/vision.md "
                "with the policy's tokenizer, or remove the images."
            )
        if model.head != "token" and not body_reads_images(model.meta_module):
            raise ConfigError(
                f"role {role!r}: {model.key}={path}: in transformers, the base model of "
                f"{config.model_type!r} does not read images, only the model with its token head, "
                "so it cannot score rows with images. Use another model for this role."
            )
        ranks = model.sharding.sp
        if ranks > 1:
            raise ConfigError(
                f"role {role!r}: {model.axes_key}.sp={ranks}, but the rows of this run have "
                f"images, whose tokens are not split over ranks. Set {model.axes_key}.sp=1; "
                "strategy=fsdp shards the model."
            )


def check_checkpoint_of(config: RunConfig, role: str, model: RoleModelSpec) -> None:
    """Reject a resume from a checkpoint of another model; the load rejects a damaged checkpoint."""
    trainer = config.trainer
    if trainer.resume_mode != "resume_path" or trainer.resume_from_path is None:
        return  # with automatic resume, the folder has the same settings
    folder = Path(trainer.resume_from_path).resolve() / role
    if (folder / "shards").is_dir():
        from workers.training.checkpoints.export import check_checkpoint_model  # imports torch

        check_checkpoint_model(folder, model.model, model.head)


def check_passes(
    config: RunConfig,
    role: str,
    model: RoleModelSpec,
    mini_batch: tuple[str, int],
    at_once: tuple[str, int | None],
) -> None:
    """Reject a mini-batch with fewer passes than pp ranks, because ranks would be idle.

    `mini_batch` is (key, rows of a mini-batch), `at_once` (key, rows of a pass, or None if passes
    are cut by tokens).
    """
    _, ranks = _pool_of(config, role)
    if ranks == 0:
        return
    dims = dims_of(ranks, model.sharding)
    pp = dims.pp
    if pp == 1:
        return
    rows_of_rank = -(-mini_batch[1] // dims.data_size)
    rows = at_once[1] or 1
    num_passes = -(-rows_of_rank // rows)
    if num_passes >= pp:
        return
    ways = f"lower {model.axes_key}.pp, or raise {mini_batch[0]}"
    if rows_of_rank >= pp:
        at_most = -(-rows_of_rank // (pp - 1)) - 1
        ways = f"set {at_once[0]}={at_most} or less, or lower {model.axes_key}.pp"
    passes = f"{num_passes} pass{'' if num_passes == 1 else 'es'}"
    cut = f" ({at_once[0]}={rows})" if at_once[1] else ""
    raise ConfigError(
        f"role {role!r}: {model.axes_key}.pp={pp} needs at least {pp} passes per mini-batch to "
        f"keep every stage busy. {mini_batch[0]} gives each rank {rows_of_rank} of "
        f"{mini_batch[1]} rows, which makes {passes}{cut}; {ways}."
    )


def check_run(config: RunConfig) -> None:
    """Check the rules between the keys that every run has."""
    trainer = config.trainer
    for name, target in trainer.stop_at.items():
        if "/" not in name and trainer.cls.startswith("trainer."):
            raise ConfigError(
                f"trainer.stop_at.{name}={target:g}: there is no such metric. Use a name from "
                "metrics.jsonl, such as critic/score/mean, the mean score in verl-like ppo."
            )
    if trainer.resume_mode == "resume_path" and trainer.resume_from_path is None:
        raise ConfigError(
            "trainer.resume_mode=resume_path needs a checkpoint. Set trainer.resume_from_path to "
            "a global_step_N folder, or leave out trainer.resume_mode."
        )
    for pool, sizes in config.resource_pool_spec.items():
        ResourcePool.named(pool, sizes)
    pools = config.resource_pool_spec
    for pool, resources in config.pool_resources.items():
        if pool not in pools:
            raise ConfigError(
                f"pool_resources.{pool}: there is no such pool.{nearest(pool, pools)} Pools: "
                f"{', '.join(pools)}."
            )
        if resources.gpus is not None and resources.device == "cpu":
            raise ConfigError(
                f"pool_resources.{pool} has device=cpu and gpus={resources.gpus:g}. Leave out gpus "
                "to keep the pool off the GPUs, or device to place it on them."
            )
        for name, amount in resources.resources.items():
            if name in ("CPU", "GPU", "memory"):
                raise ConfigError(
                    f"pool_resources.{pool}.resources.{name}: `resources` takes only custom "
                    "resources of Ray. Set `cpus` and `gpus` next to it, and leave out memory."
                )
            if amount <= 0:
                raise ConfigError(
                    f"pool_resources.{pool}.resources.{name}={amount:g}: set an amount above 0."
                )
