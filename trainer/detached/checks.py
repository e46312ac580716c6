"""The rules between fields of a detached run: refused before a device is taken."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from trainer.config.checks import check_fields
from trainer.config.unused_keys import why_unused
from trainer.detached.config import MAKER_SETTINGS, ROLLOUT, DetachedConfig, samples_per_batch
from trainer.detached.roles import maker_roles, score_roles
from trainer.detached.topology import TRAINER_POOL, Topology, maker_role, role_on
from trainer.groups.worker_groups import worker_class
from trainer.ppo.checks import refuse
from trainer.ppo.compute_advantage import compares_with_greedy
from trainer.ppo.sizes import CRITIC_COPY
from trainer.run_folder.checkpoint import Checkpoints
from verl_like.errors import CheckpointError, ConfigError
from verl_like.placement.roles import expand_roles
from workers.config import ENGINES
from workers.weights.sender import WeightSender

SAME_FOR_ALL = {
    "n": "all groups of a batch have as many samples",
    "temperature": "the log-prob passes of the trainers divide by it, too",
    "do_sample": "the log-prob passes of the trainers go by it, too",
    "log_prob_micro_batch_size_per_gpu": "it is of the actor's passes",
    "sync": "trainers send alike to all makers",
    "update_weights_bucket_megabytes": "trainers send alike to all makers",
    "val_kwargs": "a validation is sampled by one setting",
}
"""Keys of the rollout that no maker has of its own, and why."""


def check_run(config: DetachedConfig) -> None:
    """Refuse, with the numbers and the way out, what cannot work."""
    topology = config.topology
    _check_pools(config, topology)
    _check_algorithm(config)
    _check_edges(config, topology)
    _check_pieces(config, topology)
    _check_buffer(config)
    _check_rounds(config)
    _check_maker_settings(config, topology)
    _check_engines(config, topology)
    _check_scoring(config, topology)


def _check_pools(config: DetachedConfig, topology: Topology) -> None:
    pools = expand_roles(config.role_mapping)
    of_makers = maker_roles(config)
    others = {pool: role for role, pool in pools.items() if role not in of_makers}
    for role in topology.roles():
        if pools.get(role) in others:
            raise ConfigError(
                f"role_mapping.{role}={pools[role]} is the pool of {others[pools[role]]} too; a "
                "maker generates while trainers learn, so it has a pool of its own. For shared "
                "pools there is `verl-like ppo`."
            )
    shared = [pools[role] for role in topology.roles()]
    if len(set(shared)) < len(shared):
        raise ConfigError(
            f"the {topology.makers} makers have the pools {', '.join(shared)}: each needs its own."
        )
    trainers = sum(config.resource_pool_spec[pools["actor"]])
    if pools["actor"] == TRAINER_POOL and trainers != topology.trainers:
        raise ConfigError(
            f"resource_pool_spec.{TRAINER_POOL}={config.resource_pool_spec[TRAINER_POOL]} has "
            f"{trainers} ranks, and detached.trainers={topology.trainers}: set both alike."
        )


def _check_algorithm(config: DetachedConfig) -> None:
    if compares_with_greedy(config.algorithm.adv_estimator):
        raise ConfigError(
            f"algorithm.adv_estimator={config.algorithm.adv_estimator} compares every sample with "
            "a greedy answer of the same weights, and makers give none. Take rloo, which compares "
            "samples with each other, or `verl-like ppo`."
        )
    if config.trainer.backend == "torchrun":
        raise ConfigError(
            "trainer.backend=torchrun starts the ranks of one pool; makers have pools of their "
            "own. Take trainer.backend=ray or local."
        )


def _check_edges(config: DetachedConfig, topology: Topology) -> None:
    """Rows that stay with one trainer rank cannot be chosen anew among all of them."""
    if len(topology.routed_ranks) == 1:
        return
    algorithm = config.algorithm
    chooses = {
        "algorithm.filter_groups.enable": algorithm.filter_groups.enable,
        "algorithm.use_pf_ppo": algorithm.use_pf_ppo,
    }
    for key, is_set in chooses.items():
        if is_set:
            raise ConfigError(
                f"{key}=true chooses a batch's rows among those of all makers, and trainer ranks "
                "have makers of their own (detached.edges): a rank would get samples of others. "
                "Let every maker send to every rank, "
                f"detached.edges={_all_edges(topology)}, or drop one."
            )


def _all_edges(topology: Topology) -> str:
    pairs = [f"[{m},{t}]" for m in range(topology.makers) for t in range(topology.trainers)]
    return f"[{','.join(pairs)}]"


def _check_pieces(config: DetachedConfig, topology: Topology) -> None:
    batch, ranks = config.data.train_batch_size, len(topology.routed_ranks)
    size = config.piece_size
    if batch % ranks:
        near = _named(_multiples_near(batch, ranks))
        raise ConfigError(
            f"data.train_batch_size={batch} prompts do not divide among the {ranks} trainer ranks, "
            f"whose makers differ (detached.edges); nearest that do: {near}."
        )

    part = batch // ranks
    if part % size:
        fit = [number for number in range(1, part + 1) if part % number == 0]
        fit.sort(key=lambda number: abs(number - size))
        raise ConfigError(
            f"detached.prompts_per_piece={size} does not divide the {part} prompts of a batch "
            f"that one trainer rank gets; nearest that do: {_named(fit[:2])}."
        )

    total = config.data.total_prompts
    if total is not None and total % batch % ranks:
        raise ConfigError(
            f"data.total_prompts={total} ends in a batch of {total % batch} prompts, which do not "
            f"divide among the {ranks} trainer ranks, whose makers differ (detached.edges); "
            f"nearest that do: {_named(_multiples_near(total, ranks))}."
        )

    if config.detached.sampler != "in_order" and total is not None and total % batch:
        raise ConfigError(
            f"data.total_prompts={total} ends in a part of a batch of {batch}, which only "
            "detached.sampler=in_order keeps together. Set it to "
            f"{max(total // batch, 1) * batch}."
        )


def _check_buffer(config: DetachedConfig) -> None:
    detached = config.detached
    batch = samples_per_batch(config)
    if detached.limit is not None and detached.limit < batch:
        raise ConfigError(
            f"detached.limit={detached.limit} samples hold no batch of {batch} "
            "(data.train_batch_size x actor_rollout_ref.rollout.n): no step could begin. Set it to "
            f"{batch} or more, or to null."
        )
    if detached.window is not None and detached.window > detached.max_staleness:
        raise ConfigError(
            f"detached.window={detached.window} is wider than "
            f"detached.max_staleness={detached.max_staleness}, which makers keep already."
        )
    if detached.when_full == "evict_oldest" and detached.limit is None:
        raise ConfigError("detached.when_full=evict_oldest needs a detached.limit, in samples.")


def _check_rounds(config: DetachedConfig) -> None:
    detached, every = config.detached, config.trainer.save_freq
    length = detached.update_steps * detached.train_epochs
    if length > 1 and every > 0 and every % length:
        raise ConfigError(
            f"trainer.save_freq={every} falls into a round of detached.update_steps="
            f"{detached.update_steps} x detached.train_epochs={detached.train_epochs} steps, whose "
            f"batches no checkpoint holds. Take a multiple of {length}."
        )


def check_start(config: DetachedConfig) -> None:
    """Refuse to go on from the last checkpoint of a run that ended within a round."""
    update_steps, train_epochs = config.detached.update_steps, config.detached.train_epochs
    checkpoints, length = Checkpoints(config), update_steps * train_epochs
    if checkpoints.start is None or checkpoints.start_step % length == 0:
        return
    if not checkpoints.why_finished:
        raise CheckpointError(
            f"{checkpoints.start} is of a run that ended within a round of detached.update_steps="
            f"{update_steps} x detached.train_epochs={train_epochs} steps, whose batches no "
            f"checkpoint holds. Move it away to go on from one after a multiple of {length} steps, "
            "if there is one, or start in another trainer.default_local_dir."
        )


def _check_maker_settings(config: DetachedConfig, topology: Topology) -> None:
    """Makers that there are, what trainers do for all alike, and the rules of the run's own keys.

    `DetachedConfig.of_role` refuses what is no key or no value of it.
    """
    for maker, settings in config.detached.maker_settings.items():
        where = f"{MAKER_SETTINGS}.{maker}"
        if not maker.isdecimal() or int(maker) >= topology.makers:
            raise ConfigError(
                f"{MAKER_SETTINGS} names maker {maker!r}; this run has makers 0 to "
                f"{topology.makers - 1}."
            )
        for name in settings if isinstance(settings, Mapping) else ():
            if name in SAME_FOR_ALL:
                raise ConfigError(
                    f"{where}.{name} would differ from {ROLLOUT}.{name}: {SAME_FOR_ALL[name]}. Set "
                    "that key instead."
                )
        of_maker = config.of_role(maker_role(int(maker)))
        try:
            check_fields(of_maker)
            refuse(of_maker)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
        for name in settings:
            reason = why_unused(of_maker, f"{ROLLOUT}.{name}")
            if reason is not None:
                raise ConfigError(
                    f"{where}.{name} is set, but that maker does not read it: {reason}."
                )


def _check_engines(config: DetachedConfig, topology: Topology) -> None:
    """Engines are split over ranks where they can be, and can take weights when they come.

    Weights that come at once need an engine that can take them.
    """
    for maker, role in enumerate(topology.roles()):
        rollout = config.rollout_of(maker)
        if rollout.name != "vllm" and rollout.tensor_model_parallel_size > 1:
            raise ConfigError(
                f"{ROLLOUT}.tensor_model_parallel_size={rollout.tensor_model_parallel_size}: the "
                f"engine {rollout.name} of {role} is whole on every rank; vllm alone is split. "
                f"Leave it out, or set {ROLLOUT}.name=vllm."
            )
        engine = ENGINES.look_up(rollout.name)
        at_once = config.detached.new_weights == "at_once"
        if at_once and not getattr(engine, "can_take_weights_in_flight", engine == rollout.name):
            raise ConfigError(
                f"detached.new_weights=at_once: the engine {rollout.name} of {role} takes no "
                "weights within a generation (can_take_weights_in_flight is false). Set it to "
                "at_boundary."
            )


def _check_scoring(config: DetachedConfig, topology: Topology) -> None:
    """Makers that score have all their roles in the processes of their rollout."""
    roles = score_roles(config)
    if config.detached.score_on == "maker" and not roles:
        raise ConfigError(
            "detached.score_on=maker: this run has no reference, reward model or critic that could "
            "score on makers. Leave it out."
        )
    if not roles:
        return

    names = [role_on(role, maker) for maker in range(topology.makers) for role in roles]
    if twice := [name for name, number in Counter(names).items() if number > 1]:
        raise ConfigError(
            f"detached.score_on=maker: two roles are called {twice[0]}, that of a model in "
            "`rewards` and a further maker's of another. Rename the model whose name ends in a "
            "number."
        )

    pools = expand_roles(config.role_mapping)
    for role, maker in maker_roles(config).items():
        own = maker_role(maker)
        if pools.get(role) != pools.get(own):
            raise ConfigError(
                f"role_mapping.{role}={pools.get(role)} is not the pool of {own}, "
                f"{pools.get(own)}: with detached.score_on=maker it scores there. Leave it out, or "
                "set detached.score_on=trainer."
            )

    if config.actor_rollout_ref.ref.update_every is not None and "ref" in roles:
        raise ConfigError(
            f"actor_rollout_ref.ref.update_every={config.actor_rollout_ref.ref.update_every} with "
            "detached.score_on=maker: makers' references stand still. Drop one."
        )
    if CRITIC_COPY in roles and config.detached.new_weights == "at_once":
        raise ConfigError(
            "detached.new_weights=at_once with detached.score_on=maker: a maker's copy of the "
            "critic takes weights between two pieces. Set at_boundary, score_on=trainer, or an "
            "algorithm.adv_estimator without a critic, such as grpo."
        )
    _check_critic_sends(config, roles)


def _check_critic_sends(config: DetachedConfig, roles: Mapping[str, str]) -> None:
    """A critic of the user's own can send its weights."""
    if CRITIC_COPY in roles and not issubclass(worker_class(config, "critic"), WeightSender):
        raise ConfigError(
            f"role_workers.critic={config.role_workers['critic']} cannot publish its weights, "
            "which makers' copies need (detached.score_on=maker). Derive it from "
            "workers.roles.critic.CriticWorker, or set detached.score_on=trainer."
        )


def _multiples_near(number: int, of: int) -> list[int]:
    """The next multiples below and above, or the first one."""
    return sorted({max(number // of, 1) * of, -(-number // of) * of})


def _named(numbers: list[int]) -> str:
    return " and ".join(map(str, numbers))
