"""What an asynchronous run checks and prints before any device is allocated."""

from __future__ import annotations

from trainer.async_training.config import GENERATOR_SETTINGS, ROLLOUT, AsyncConfig, open_at_once
from trainer.async_training.topology import ANY_RANK, CRITIC_COPY, TRAINER_POOL, generator_role
from trainer.config.checks import check_fields
from trainer.config.unused_keys import notice_of, unused_reason
from trainer.groups.worker_groups import worker_class
from trainer.ppo.advantage_inputs import compares_with_greedy
from trainer.ppo.config_errors import reject
from trainer.ppo.filters import active_filters
from trainer.rollouts.preflight import check_rollout
from trainer.run_folder.resume import ResumePoint
from verl_like.errors import CheckpointError, ConfigError
from verl_like.placement.pools import expand_roles
from workers.config import ROLLOUT_ENGINES
from workers.weights.transfer import WeightSender


def check_run(config: AsyncConfig) -> list[str]:
    """Reject settings that cannot work, with a way out; return notices of unread settings."""
    topology = config.topology
    pools = expand_roles(config.role_mapping)
    for role, (_, generator) in config.generator_roles.items():
        pool, generators_pool = pools[role], pools[generator_role(generator)]
        if pool != generators_pool:
            raise ConfigError(
                f"role_mapping.{role}={pool} is not {generator_role(generator)}'s pool, "
                f"{generators_pool}: with async_training.score_on=generator, this role scores in "
                f"the generator's pool. Leave out role_mapping.{role}, or set "
                "async_training.score_on=trainer."
            )
        for other in pools.keys() - {role}:
            if pools[other] == pool and config.generator_roles.get(other, ("", -1))[1] != generator:
                raise ConfigError(
                    f"role_mapping.{role}={pool} is also the pool of {other}, but a generator "
                    "runs at the same time as trainers and other generators. Give each its own "
                    "pool, or use `verl-like ppo`, where roles can share a pool."
                )

    spec = config.resource_pool_spec.get(TRAINER_POOL, [])
    if pools["actor"] == TRAINER_POOL and sum(spec) != topology.trainers:
        raise ConfigError(
            f"resource_pool_spec.{TRAINER_POOL}={spec} adds up to {sum(spec)}, but "
            f"async_training.trainers={topology.trainers}. Set both to the same number of ranks."
        )

    algorithm = config.algorithm
    if compares_with_greedy(algorithm.adv_estimator):
        raise ConfigError(
            f"algorithm.adv_estimator={algorithm.adv_estimator} compares samples with a greedy "
            "response of the same weights, which generators do not produce. Use "
            "algorithm.adv_estimator=rloo, which compares samples with each other, or `verl-like "
            "ppo`."
        )
    chooses = {
        "algorithm.filter_groups.enable": algorithm.filter_groups.enable,
        **{name: entry.resamples for name, entry in active_filters(config).items()},
    }
    for key, is_set in chooses.items():
        if is_set and len(topology.routed_ranks) > 1:
            pairs = [
                f"[{m},{t}]" for m in range(topology.generators) for t in range(topology.trainers)
            ]
            raise ConfigError(
                f"{key}=true selects a batch's rows from all generators, but "
                "the routes of samples give each trainer rank separate generators: a rank "
                f"would get samples of other ranks' generators. Drop {key}, or let every "
                "generator send to every rank with "
                f"async_training.sample_routes=[{','.join(pairs)}]."
            )

    # batches split evenly over ranks and into chunks, and checkpoints come at the ends of rounds
    async_training, ranks = config.async_training, len(topology.routed_ranks)
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
                f"data.{key}={number}{ends or ' prompts'} is not divisible by the {ranks} "
                "trainer ranks, each of which has its own generators "
                "(async_training.sample_routes). Nearest values that are: "
                f"{' and '.join(map(str, sorted(near)))}."
            )

    part = batch // ranks
    if part % config.chunk_size:
        fit = [size for size in range(1, part + 1) if part % size == 0]
        fit.sort(key=lambda size: abs(size - config.chunk_size))
        raise ConfigError(
            f"async_training.prompts_per_call={config.chunk_size} does not divide the {part} "
            f"prompts per batch{' of a trainer rank' if ranks > 1 else ''}; nearest that do: "
            f"{' and '.join(map(str, fit[:2]))}."
        )
    if async_training.sampler != "in_order" and total is not None and total % batch:
        raise ConfigError(
            f"data.total_prompts={total} is not a multiple of the batch of {batch} prompts. Only "
            "async_training.sampler=in_order can train on an incomplete last batch. Set "
            f"data.total_prompts={max(total // batch, 1) * batch}."
        )
    length, every = config.steps_per_version, config.trainer.save_freq
    if every > 0 and every % length:
        raise ConfigError(
            f"trainer.save_freq={every} saves in the middle of a round of {length} steps "
            "(async_training.update_steps x async_training.train_epochs), and a checkpoint does "
            f"not store the batches of a round. Set trainer.save_freq to a multiple of {length}."
        )
    return _check_generators(config)


def _check_generators(config: AsyncConfig) -> list[str]:
    """Check the buffer, the generators' settings and engines, and the roles that score there."""
    async_training, topology = config.async_training, config.topology
    num_samples = config.samples_per_batch
    fewest = async_training.min_generators
    if fewest is not None and (fewest > topology.generators or topology.routed_ranks != [ANY_RANK]):
        raise ConfigError(
            f"async_training.min_generators={fewest} needs {fewest} or more generators (there are "
            f"{topology.generators}), all of which send samples to every trainer: raise "
            "async_training.generators, or list every pair in async_training.sample_routes."
        )
    if fewest is not None and async_training.on_generator_failure == "fail":
        raise ConfigError(
            f"async_training.min_generators={fewest} lets generators leave, but "
            "async_training.on_generator_failure=fail ends the run then. Set it to restart (others "
            "may come back) or continue."
        )
    limit, age = async_training.max_inflight_samples, async_training.drop_older_than
    if limit is not None and limit < num_samples:
        raise ConfigError(
            f"async_training.max_inflight_samples={limit} is less than a batch of {num_samples} "
            "samples (data.train_batch_size x actor_rollout_ref.rollout.n): no step could begin. "
            f"Set async_training.max_inflight_samples to {num_samples} or more, or to null."
        )
    if age is not None and age > async_training.max_staleness:
        raise ConfigError(
            f"async_training.drop_older_than={age} has no effect above "
            f"async_training.max_staleness={async_training.max_staleness}, which generators "
            "already enforce. Lower async_training.drop_older_than, or leave it out."
        )
    if async_training.on_buffer_full == "evict_oldest" and limit is None:
        raise ConfigError(
            "async_training.on_buffer_full=evict_oldest needs a limit. Set "
            "async_training.max_inflight_samples to a number of samples."
        )

    # `generator_settings` must name existing generators and have valid values
    notices = []
    for generator, settings in async_training.generator_settings.items():
        where = f"{GENERATOR_SETTINGS}.{generator}"
        if generator >= topology.generators:
            raise ConfigError(
                f"{where}: generators are numbered from 0, and this run has "
                f"{topology.generators}. Use a smaller number, or more generators."
            )
        of_generator = config.for_role(generator_role(generator))
        try:
            check_fields(of_generator)
            reject(of_generator)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
        for name in settings.chosen():
            reason = unused_reason(of_generator, f"{ROLLOUT}.{name}")
            if reason:
                notices.append(notice_of([f"{where}.{name}"], reason))

    # with weight_update=immediate, the engines must take weights in the middle of a generation
    at_once = async_training.weight_update == "immediate"
    for generator, role in enumerate(topology.roles()):
        rollout = config.rollout_of(generator)
        engine = ROLLOUT_ENGINES.look_up(rollout.name)
        if at_once and not getattr(engine, "can_take_weights_in_flight", engine == rollout.name):
            raise ConfigError(
                f"async_training.weight_update=immediate: {role}'s engine {rollout.name} cannot "
                "load weights during a generation (can_take_weights_in_flight is false). Set "
                "async_training.weight_update=between_batches."
            )

    # roles with which generators score need unique names, and weights that are fixed or synced
    roles = config.score_roles
    if async_training.score_on == "generator" and not roles:
        raise ConfigError(
            "async_training.score_on=generator: this run has no reference, reward model or critic "
            "that could score on generators. Leave out async_training.score_on."
        )
    if len(config.generator_roles) < async_training.generators * (1 + len(roles)):
        raise ConfigError(
            "async_training.score_on=generator: the name of a model in `reward.list` ends in a "
            "number, so it is also the name of a generator's role "
            f"({', '.join(config.generator_roles)}). Rename the model."
        )
    if config.actor_rollout_ref.ref.update_every is not None and "ref" in roles:
        raise ConfigError(
            f"actor_rollout_ref.ref.update_every={config.actor_rollout_ref.ref.update_every} with "
            "async_training.score_on=generator: the generators' references do not change. Leave "
            "out update_every for a fixed reference, or set async_training.score_on=trainer."
        )
    if CRITIC_COPY in roles and async_training.weight_update == "immediate":
        raise ConfigError(
            "async_training.weight_update=immediate with async_training.score_on=generator: a "
            "generator's copy of the critic receives weights only between two calls. Set "
            "async_training.weight_update=between_batches, async_training.score_on=trainer, or an "
            "algorithm.adv_estimator without a critic, such as grpo."
        )
    if CRITIC_COPY in roles and not issubclass(worker_class(config, "critic"), WeightSender):
        raise ConfigError(
            f"role_workers.critic={config.role_workers['critic']} cannot publish its weights, "
            "which generators' copies need (async_training.score_on=generator). Derive it from "
            "verl_like.extend.CriticWorker, or set async_training.score_on=trainer."
        )
    return notices


def check_start(config: AsyncConfig) -> None:
    """Reject resuming from a checkpoint of a run that ended within a round."""
    resume, length = ResumePoint(config), config.steps_per_version
    if resume.start is None or resume.start_step % length == 0:
        return
    if not resume.finished_message:
        raise CheckpointError(
            f"{resume.start} was saved in the middle of a round of {length} steps "
            "(async_training.update_steps x async_training.train_epochs), and checkpoints do not "
            f"contain the batches of a round. Resume from a step that is a multiple of {length}: "
            "move later checkpoints away, and set trainer.resume_from_path if this run sets it. Or "
            "start in another trainer.default_local_dir."
        )


def check_engines(config: AsyncConfig) -> None:
    """Check that each generator's engine is installed and supports the generator's settings."""
    for generator, role in enumerate(config.topology.roles()):
        config_of_generator = config.for_role(role)
        try:
            check_rollout(config_of_generator, role)
        except ConfigError as error:
            if config_of_generator is config:
                raise
            raise ConfigError(f"{GENERATOR_SETTINGS}.{generator}: {error}") from error


AGES = {0: "samples are of the newest version", 1: "samples are at most 1 version old"}
MOMENTS = {"between_batches": "between two calls", "immediate": "in the middle of a call"}


def plan_lines(config: AsyncConfig, brief: bool = False) -> list[str]:
    """Describe routes, how far generators run ahead, and when weights reach them."""
    async_training, topology = config.async_training, config.topology
    generators, num_open = topology.generators, open_at_once(config)
    staleness, num_batches = async_training.max_staleness, async_training.update_steps
    age = AGES.get(staleness, f"samples are at most {staleness} versions old")
    rounds = "batch" if num_batches == 1 else f"{num_batches} batches"
    if async_training.train_epochs > 1:
        rounds += f", trained on {async_training.train_epochs} times"
    batch = config.data.train_batch_size
    most = max(map(config.chunks_in_parallel, range(generators)))
    together = f", up to {most} calls per generator at the same time" if most > 1 else ""
    queued = f"at most {num_open:,} queued or in generation"
    lines = [
        *topology.describe().splitlines(),
        f"Batch: {batch:,} prompts in {_count(batch // config.chunk_size, 'call')} of "
        f"{_count(config.chunk_size, 'prompt')}; each call goes to one generator{together}",
        f"Staleness: {age} in an update, and generators pause when a new sample would exceed this",
        f"Samples: {queued} ({num_open / config.samples_per_batch:.3g} batches)",
        f"Weight sync: after every {rounds}, and a generator loads new weights "
        f"{MOMENTS[async_training.weight_update]}",
    ]
    roles = config.score_roles
    if roles:
        lines.append(f"Scores: each generator scores its samples with its own {', '.join(roles)}")
    weights = config.algorithm.rollout_correction.rollout_is
    if weights:
        lines.append(f"Correction: rollout_is={weights} (algorithm.rollout_correction)")
    if brief:
        lines = [f"Staleness: {age}, {queued}"]
    if topology.imbalance:
        lines.append(f"Uneven generators: {topology.imbalance}.")
    idle = _idle_generators(config)
    if idle:
        limits = "async_training.max_staleness"
        if async_training.max_inflight_samples is not None:
            limits = f"async_training.max_inflight_samples or {limits}"
        lines.append(
            f"Idle generators: {idle} of {generators}, because too few samples may be queued or in "
            f"generation. Lower async_training.prompts_per_call, or raise {limits}."
        )
    return lines


def _idle_generators(config: AsyncConfig) -> int:
    """Count the generators that have no work because too few chunks may be open."""
    ranks = config.topology.routed_ranks
    samples_per_chunk = config.chunk_size * config.actor_rollout_ref.rollout.n
    num_open = open_at_once(config) // len(ranks) // samples_per_chunk
    busy = {
        generator for rank in ranks for generator in config.topology.generators_for(rank)[:num_open]
    }
    return config.topology.generators - len(busy)


def _count(number: int, noun: str) -> str:
    """Return words such as `1 chunk` and `2 chunks`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
