"""The rollout: the policy generating.

Where its weights live:

    beside the actor, whole      the native engine decodes with the actor's module, by reference
    beside the actor, sharded    one unsharded copy per version, gathered tensor by tensor; so, too,
                                 where `rollout.dtype` is another type than the weights'
    in a pool of its own         a copy that the actor fills through `workers.weights.channel`

Engines issue no collective of all ranks: they decode different numbers of steps. Ranks that share
one (tensor parallelism) get the same rows; the first leads them, and answers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from verl_like.batch.protocol import DataProto
from verl_like.calls.dispatch import (
    Dispatch,
    collect_list,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)
from verl_like.config_key import changed
from verl_like.errors import RolloutError, WeightSyncError
from verl_like.process.worker import Worker
from workers.agents.faults import Faults
from workers.agents.players import Players, trajectory_columns, with_prompts
from workers.agents.trajectory import Trajectory
from workers.columns import NAMED, batch_columns, require
from workers.config import plays, replays_routing
from workers.models.folder import generation_eos
from workers.rollout.base import RolloutEngine, SamplingParams
from workers.rollout.batches import (
    REQUEST,
    NoiseOf,
    oldest_versions,
    sample_columns,
    samples_of,
)
from workers.rollout.build import (
    build_engine,
    check_engine,
    engine_for,
    ranks_per_engine,
    tokenizer_of,
)
from workers.rollout.draws import draw_hashes
from workers.rollout.sample import Sample, noise_key
from workers.rollout.sampling_settings import EXTRA_SAMPLING, STOPS, sampling_params
from workers.rollout.vllm.lockstep import in_step
from workers.weights.channel import SyncReport
from workers.weights.host_copy import HostCopy
from workers.weights.receiver import WeightReceiver

if TYPE_CHECKING:
    from workers.config import WorkersConfig

MESH = "rollout"
"""Ranks with one data rank share an engine."""
SPLIT = make_nd_compute_dataproto_dispatch_fn(MESH)
ASK = replace(SPLIT, collect_fn=collect_list, form="list", collecting_ranks=None)
"""Rows are split over the engines; nothing comes back."""


class RolloutWorker(WeightReceiver, Worker):
    """Turns prompts into samples, each the same wherever it is made.

    A sample's noise is keyed by seed, uid and sample index.
    """

    def __init__(self, config: WorkersConfig) -> None:
        super().__init__()
        name = engine_for(config.actor_rollout_ref.rollout, self.device.type)
        config = changed(config, {"actor_rollout_ref.rollout.name": name})
        self.policy = config.actor_rollout_ref
        self.config = self.policy.rollout
        self.prompt_width: int = config.data.max_prompt_length
        self.response_width: int = config.data.max_response_length
        self.seed: int = config.trainer.seed
        self.model_eos = generation_eos(self.policy.model.path)
        check_engine(config, self.world_size)
        ranks = ranks_per_engine(config)
        self._register_dispatch_collect_info(
            MESH, self.rank // ranks, is_collect=self.rank % ranks == 0
        )
        self._whole_config = config
        self.copy = HostCopy() if self.config.sync == "changed" else None
        self.players = self._players(config)
        self._submitted: dict[int, tuple[DataProto, int]] = {}
        """By the engine's number of a sample: the batch that it came in, and its row there."""

    def _players(self, config: WorkersConfig) -> Players | None:
        if not plays(config):
            return None
        faults = Faults.of(getattr(config, "chaos", None))
        return Players(config.environment, tokenizer_of(self.policy.model.path), faults)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Build the engine, which is stale until the first sync.

        Beside an actor: after the actor's `init_model`.
        """
        self.open_process_group()
        self.engine = build_engine(self._whole_config, self)

    @register(dispatch_mode=SPLIT, readonly=True)
    @batch_columns(reads=("input_ids", "attention_mask", "position_ids", *NAMED))
    @in_step(lambda: None)
    def generate_sequences(self, data: DataProto) -> DataProto:
        """One response per row, or the rest of one, where the rows are unfinished samples.

        `meta_info` carries the ids of eos and pad, and may override the sampling settings.
        """
        sampling = self.sampling_of(data)
        if self.players is None:
            return self._batch_of(data, self.engine.generate(self.requests_of(data), sampling))
        played = self.players.play(data, self.engine, sampling, self._noise_of(data))
        return self._batch_of_played(data, played)

    @register(dispatch_mode=ASK, readonly=True, blocking=False)
    @in_step(lambda: None)
    def submit(self, data: DataProto) -> None:
        """Begin the samples of these rows, which `take` gives with their column `request`."""
        require(data, REQUEST)
        sampling = self.sampling_of(data)
        if self.players is None:
            numbers = self.engine.submit(self.requests_of(data), sampling)
        else:
            numbers = self.players.submit(data, self.engine, sampling, self._noise_of(data))
        self._submitted |= {number: (data, row) for row, number in enumerate(numbers)}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    @in_step(lambda: None)
    def take(self, max_tokens: int | None = None, seconds: float | None = None) -> DataProto | None:
        """The samples that are finished after so many further tokens of one, or so long."""
        draws: RolloutEngine | Players = self.players or self.engine
        try:
            return self._rows_of(draws.take(max_tokens, seconds))
        finally:
            if not draws.num_running:
                self._submitted = {}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @in_step(lambda: None)
    def abort(self) -> DataProto | None:
        """Let go of all that was submitted; the unfinished samples, which can be submitted on.

        Trajectories are begun anew where they are submitted again.
        """
        if self.players is not None:
            self.players.abort()
            self._submitted = {}
            return None
        return self._rows_of(self.engine.abort())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def follow(self) -> None:
        """Have the engine of this rank do what that of its first rank does in one call."""
        self.engine.follow()

    def _rows_of(self, samples: Mapping[int, Sample | Trajectory]) -> DataProto | None:
        """Samples as rows, with what was submitted beside the prompts."""
        by_batch: dict[int, list[int]] = defaultdict(list)
        for number in samples:
            by_batch[id(self._submitted[number][0])].append(number)
        parts = []
        for numbers in by_batch.values():
            origins = [self._submitted.pop(number) for number in numbers]
            asked = origins[0][0].select_idxs([row for _, row in origins])
            asked.shard = None
            made: Any = [samples[number] for number in numbers]
            batch_of = self._batch_of if self.players is None else self._batch_of_played
            part = batch_of(asked, made)
            parts.append(part.union(DataProto.from_dict({REQUEST: asked.padded(REQUEST)})))
        return DataProto.concat(parts) if parts else None

    def _batch_of_played(self, data: DataProto, played: list[Trajectory]) -> DataProto:
        """Trajectories as rows."""
        prompts = with_prompts(data, played, int(data.meta_info["pad_token_id"]))
        batch = self._batch_of(prompts, [one.sample for one in played])
        return batch.union(trajectory_columns(batch, played))

    def _batch_of(self, data: DataProto, samples: list[Sample]) -> DataProto:
        pad = data.meta_info.get("pad_token_id")
        if pad is None:
            raise RolloutError(
                "rollout: meta_info has no pad_token_id; the data loader sets it (pad, else eos)."
            )
        sampling = self.sampling_of(data)
        columns = sample_columns(
            data,
            samples,
            self.response_width,
            int(pad),
            sampling.truncated_log_probs,
            self.engine.no_choices() if sampling.routed_experts else None,
        )
        columns["policy_version"] = oldest_versions(samples, len(data), self.engine.version or 0)
        columns["draw_hash"] = draw_hashes(samples, len(data))
        reasons = [sample.finish_reason for sample in samples]
        return DataProto.from_dict(
            columns, {"finish_reason": reasons + ["pad"] * (len(data) - len(reasons))}
        )

    def sampling_of(self, data: DataProto) -> SamplingParams:
        """The config's settings under those of the batch; for validation `val_kwargs` alone.

        A response ends at the tokenizer's eos, which the batch carries, at those that the model's
        folder names, and at `sampling_kwargs.stop_token_ids`: so in every engine.
        """
        eos = data.meta_info.get("eos_token_id")
        stop = tuple(int(token) for token in ([eos] if isinstance(eos, int) else eos or ()))
        stop = (*stop, *self.model_eos)
        if not stop:
            raise RolloutError(
                "rollout: meta_info has no eos_token_id and the model's generation_config.json "
                "none: no response could end. Has the tokenizer one?"
            )

        names = ("temperature", "top_k", "top_p", "do_sample")
        validates = bool(data.meta_info.get("validate"))
        settings = {name: getattr(self.config, name) for name in names}
        if validates:
            settings = {name: getattr(self.config.val_kwargs, name) for name in names}
        for name, value in self.config.sampling_kwargs.items():
            if name in STOPS or not validates:
                settings[name] = value
        own = {*names, "max_tokens", *EXTRA_SAMPLING} & data.meta_info.keys()
        settings |= {name: data.meta_info[name] for name in own}
        sampling = sampling_params(settings, self.response_width, stop)
        return replace(sampling, routed_experts=replays_routing(self.policy) and not validates)

    def requests_of(self, data: DataProto) -> list[Sample]:
        """The real rows as samples that are to be drawn, or drawn on."""
        return samples_of(data, self.prompt_width, self._noise_of(data))

    def _noise_of(self, data: DataProto) -> NoiseOf:
        attempt = data.meta_info.get("attempt", 0)
        stream = "validate" if data.meta_info.get("validate") else "train"

        def noise_of(uid: str, index: int) -> int:
            return noise_key(self.seed, uid, index, attempt, stream)

        return noise_of

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def update_weights(self, version: int) -> SyncReport:
        """Take over the weights of the actor in this process.

        The new version counts once every rank has verified its copy.
        """
        actor: Any = self.sibling("actor")
        if actor is None:
            raise WeightSyncError(
                "rollout.update_weights: no actor in this process; call sync_weights on the driver."
            )
        self.engine.wake_up()
        if not self.engine.owns_weights:
            if self.engine.module is not actor.engine.module:
                raise WeightSyncError(
                    "the actor was built anew after the rollout; call rollout.init_model again."
                )
            self.engine.commit(version)
            return SyncReport()
        error: str | None = None
        try:
            self.engine.load_weights(actor.engine.named_full_tensors(dtype=actor.sent_dtype))
        except WeightSyncError as problem:
            error = f"rollout rank {self.rank}: {problem}"
        self.commit_if_all_loaded(version, error)
        return SyncReport(error, self.engine.num_bytes, self.engine.hash_s)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def weights_checksum(self) -> str:
        """Hash of the full weights, comparable with the actor's."""
        return self.engine.weights_checksum()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sleep(self) -> None:
        """Free what training can use; a copy of the weights is gone until the next sync."""
        self.engine.sleep()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def wake_up(self) -> None:
        """Allocate the memory that `sleep` freed."""
        self.engine.wake_up()
