"""The rules between fields of a detached run: refused before a device is taken."""

from __future__ import annotations

import logging

from trainer.config.checks import check_fields
from trainer.config.unused_keys import notice_of, why_unused
from trainer.detached.config import MAKER_SETTINGS, ROLLOUT, DetachedConfig, samples_per_batch
from trainer.detached.topology import TRAINER_POOL, Topology, maker_role
from trainer.groups.worker_groups import worker_class
from trainer.ppo.checks import refuse
from trainer.ppo.compute_advantage import compares_with_greedy
from trainer.ppo.sizes import CRITIC_COPY
from trainer.rollouts.preflight import check_rollout
from trainer.run_folder.resume import ResumePoint
from verl_like.errors import CheckpointError, ConfigError
from verl_like.placement.roles import expand_roles
from workers.config import ENGINES
from workers.weights.sender import WeightSender

logger = logging.getLogger(__name__)


def check_run(config: DetachedConfig) -> None:
    """Refuse, with the numbers and the way out, what cannot work."""
    topology = config.topology
    _check_pools(config, topology)
    _check_algorithm(config, topology)
    _check_sizes(config, topology)
    _check_buffer(config)
    _check_maker_settings(config, topology)
    _check_weights_in_flight(config, topology)
    _check_scoring(config)


def _check_pools(config: DetachedConfig, topology: Topology) -> None:
    pools = expand_roles(config.role_mapping)
    for role, (_, maker) in config.maker_roles.items():
        pool, own = pools[role], pools[maker_role(maker)]
        if pool != own:
            raise ConfigError(
                f"role_mapping.{role}={pool} is not the pool of {maker_role(maker)}, {own}: with "
                "detached.score_on=maker it scores there. Leave it out, or set "
                "detached.score_on=trainer."
            )
        for other in pools.keys() - {role}:
            if pools[other] == pool and config.maker_roles.get(other, ("", -1))[1] != maker:
                raise ConfigError(
                    f"role_mapping.{role}={pool} is the pool of {other} too: a maker generates "
                    "while trainers learn and other makers generate, so each needs its own. For "
                    "shared pools there is `verl-like ppo`."
                )

    spec = config.resource_pool_spec.get(TRAINER_POOL, [])
    if pools["actor"] == TRAINER_POOL and sum(spec) != topology.trainers:
        raise ConfigError(
            f"resource_pool_spec.{TRAINER_POOL}={spec} has {sum(spec)} ranks, and "
            f"detached.trainers={topology.trainers}: set both alike."
        )


def _check_algorithm(config: DetachedConfig, topology: Topology) -> None:
    algorithm = config.algorithm
    if compares_with_greedy(algorithm.adv_estimator):
        raise ConfigError(
            f"algorithm.adv_estimator={algorithm.adv_estimator} compares every sample with "
            "a greedy answer of the same weights, and makers give none. Take rloo, which compares "
            "samples with each other, or `verl-like ppo`."
        )
    chooses = {
        "algorithm.filter_groups.enable": algorithm.filter_groups.enable,
        "algorithm.use_pf_ppo": algorithm.use_pf_ppo,
    }
    for key, is_set in chooses.items():
        if is_set and len(topology.routed_ranks) > 1:
            pairs = [f"[{m},{t}]" for m in range(topology.makers) for t in range(topology.trainers)]
            raise ConfigError(
                f"{key}=true chooses a batch's rows among those of all makers, and trainer ranks "
                "have makers of their own (detached.edges): a rank would get samples of others. "
                f"Let every maker send to every rank, detached.edges=[{','.join(pairs)}], or drop "
                "one."
            )


def _check_sizes(config: DetachedConfig, topology: Topology) -> None:
    """A batch is cut into parts for trainer ranks, a part into pieces; rounds are whole."""
    detached, ranks = config.detached, len(topology.routed_ranks)
    batch, total = config.data.train_batch_size, config.data.total_prompts
    last = batch if total is None else total % batch
    for key, number, prompts in (
        ("train_batch_size", batch, batch),
        ("total_prompts", total or 0, last),
    ):
        if prompts % ranks:
            near = {max(number // ranks, 1) * ranks, -(-number // ranks) * ranks}
            ends = f" ends in a batch of {prompts} prompts, which" if key == "total_prompts" else ""
            raise ConfigError(
                f"data.{key}={number}{ends or ' prompts'} do not divide among the {ranks} trainer "
                "ranks, whose makers differ (detached.edges); nearest that do: "
                f"{' and '.join(map(str, sorted(near)))}."
            )

    part = batch // ranks
    if part % config.piece_size:
        fit = [size for size in range(1, part + 1) if part % size == 0]
        fit.sort(key=lambda size: abs(size - config.piece_size))
        raise ConfigError(
            f"detached.prompts_per_piece={config.piece_size} does not divide the {part} prompts "
            "of a batch that one trainer rank gets; nearest that do: "
            f"{' and '.join(map(str, fit[:2]))}."
        )
    if detached.sampler != "in_order" and total is not None and total % batch:
        raise ConfigError(
            f"data.total_prompts={total} ends in a part of a batch of {batch}, which only "
            "detached.sampler=in_order keeps together. Set it to "
            f"{max(total // batch, 1) * batch}."
        )
    length, every = config.steps_per_version, config.trainer.save_freq
    if every > 0 and every % length:
        raise ConfigError(
            f"trainer.save_freq={every} falls into a round of {length} steps "
            "(detached.update_steps x detached.train_epochs), whose batches no checkpoint holds. "
            f"Take a multiple of {length}."
        )


def _check_buffer(config: DetachedConfig) -> None:
    detached, batch = config.detached, samples_per_batch(config)
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


def check_start(config: DetachedConfig) -> None:
    """Refuse to go on from the last checkpoint of a run that ended within a round."""
    resume, length = ResumePoint(config), config.steps_per_version
    if resume.start is None or resume.start_step % length == 0:
        return
    if not resume.why_finished:
        raise CheckpointError(
            f"{resume.start} is of a run that ended within a round of {length} steps "
            "(detached.update_steps x detached.train_epochs), whose batches no checkpoint holds. "
            f"Move it away to go on from one after a multiple of {length} steps, if there is one, "
            "or start in another trainer.default_local_dir."
        )


def check_engines(config: DetachedConfig) -> None:
    """Check that each maker's engine is here and can do what its settings ask for."""
    for maker, role in enumerate(config.topology.roles()):
        config_of_maker = config.of_role(role)
        try:
            check_rollout(config_of_maker, role)
        except ConfigError as error:
            if config_of_maker is config:
                raise
            raise ConfigError(f"{MAKER_SETTINGS}.{maker}: {error}") from error


def _check_maker_settings(config: DetachedConfig, topology: Topology) -> None:
    """A maker's settings are those of a maker that there is, and keep the rules of their keys."""
    for maker, settings in config.detached.maker_settings.items():
        where = f"{MAKER_SETTINGS}.{maker}"
        if maker >= topology.makers:
            raise ConfigError(f"{where}: this run has makers 0 to {topology.makers - 1}.")
        own = config.of_role(maker_role(maker))
        try:
            check_fields(own)
            refuse(own)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
        for name in settings.chosen():
            if reason := why_unused(own, f"{ROLLOUT}.{name}"):
                logger.warning(notice_of([f"{where}.{name}"], reason))


def _check_weights_in_flight(config: DetachedConfig, topology: Topology) -> None:
    """Reject engines that cannot take weights when they come."""
    at_once = config.detached.new_weights == "at_once"
    for maker, role in enumerate(topology.roles()):
        rollout = config.rollout_of(maker)
        engine = ENGINES.look_up(rollout.name)
        if at_once and not getattr(engine, "can_take_weights_in_flight", engine == rollout.name):
            raise ConfigError(
                f"detached.new_weights=at_once: the engine {rollout.name} of {role} takes no "
                "weights within a generation (can_take_weights_in_flight is false). Set it to "
                "at_boundary."
            )


def _check_scoring(config: DetachedConfig) -> None:
    """Roles with which makers score have names of their own, and weights that do not move alone."""
    detached, roles = config.detached, config.score_roles
    if detached.score_on == "maker" and not roles:
        raise ConfigError(
            "detached.score_on=maker: this run has no reference, reward model or critic that could "
            "score on makers. Leave it out."
        )
    if len(config.maker_roles) < detached.makers * (1 + len(roles)):
        raise ConfigError(
            "detached.score_on=maker: a model in `rewards` has a name that ends in a number, as a "
            f"further maker's role has ({', '.join(config.maker_roles)}). Rename it."
        )
    if config.actor_rollout_ref.ref.update_every is not None and "ref" in roles:
        raise ConfigError(
            f"actor_rollout_ref.ref.update_every={config.actor_rollout_ref.ref.update_every} with "
            "detached.score_on=maker: makers' references stand still. Drop one."
        )
    if CRITIC_COPY in roles and detached.new_weights == "at_once":
        raise ConfigError(
            "detached.new_weights=at_once with detached.score_on=maker: a maker's copy of the "
            "critic takes weights between two pieces. Set at_boundary, score_on=trainer, or an "
            "algorithm.adv_estimator without a critic, such as grpo."
        )
    if CRITIC_COPY in roles and not issubclass(worker_class(config, "critic"), WeightSender):
        raise ConfigError(
            f"role_workers.critic={config.role_workers['critic']} cannot publish its weights, "
            "which makers' copies need (detached.score_on=maker). Derive it from "
            "workers.roles.critic.CriticWorker, or set detached.score_on=trainer."
        )
