"""The rollout: generates samples with the policy.

Where its weights are:

    with the actor, whole        the native engine decodes with the actor's module, by reference
    with the actor, otherwise    one copy per version, filled tensor by tensor: if the actor is
                                 sharded, or for another engine, a quantization, or a
                                 `rollout.dtype` other than the dtype of the weights
    in a separate pool           a copy that the actor fills through `workers.weights.channel`

Engines run no collectives over all ranks, because each decodes a different number of steps. Ranks
that share an engine (tensor parallelism) get the same rows; the first of them leads and returns the
results.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from verl_like.batch.columns import object_rows
from verl_like.batch.protocol import DataProto
from verl_like.calls.dispatch import (
    Dispatch,
    all_ranks,
    collect_list,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)
from verl_like.errors import RolloutError, WeightSyncError
from verl_like.process.worker import Worker
from workers.columns import IMAGES, NAMED, batch_columns, require
from workers.config import RolloutConfig, WorkersConfig, has_environment, replays_routing
from workers.models.folder import generation_eos, set_template_variables
from workers.models.state import named_state
from workers.rollout.base import RolloutEngine, SamplingParams, followed_by_ranks
from workers.rollout.build_engine import (
    build_engine,
    check_engine,
    load_module,
    ranks_per_engine,
    takes_adapter,
    tokenizer_of,
)
from workers.rollout.sample import REQUEST, Sample, read_samples, sample_seed, to_batch
from workers.rollout.sampling import EXTRA_SAMPLING, STOPS, sampling_params
from workers.weights.sync import SyncReport
from workers.weights.transfer import WeightReceiver

if TYPE_CHECKING:
    from workers.agents.players import Players
    from workers.agents.trajectory import Trajectory

MESH = "rollout"
"""Name of the dispatch mesh; in it, the ranks of one engine have the same data rank."""
ROLLOUT_DISPATCH = make_nd_compute_dataproto_dispatch_fn(MESH)
SUBMIT_DISPATCH = replace(
    ROLLOUT_DISPATCH, collect_fn=collect_list, returns_batch=False, collecting_ranks=all_ranks
)
"""A dispatch mode: splits rows over the engines, and returns nothing."""


class RolloutWorker(WeightReceiver, Worker):
    """Generates samples, whose noise does not depend on the rank that generates them.

    The random numbers of a sample are keyed by seed, uid, sample index and attempt, and by whether
    it is for training or validation.

    Example:

        rollout = LocalWorkerGroup(pool, ClassWithInitArgs(RolloutWorker, config))
        rollout.init_model()
        samples = rollout.generate_sequences(repeat_prompts(prompts, num_samples=4))
    """

    engine: RolloutEngine

    def __init__(self, config: WorkersConfig) -> None:
        super().__init__()
        self.policy = config.actor_rollout_ref
        self.config: RolloutConfig = self.policy.rollout
        self.prompt_width: int = config.data.max_prompt_length
        self.response_width: int = config.data.max_response_length
        self.seed: int = config.trainer.seed
        self.model_eos = generation_eos(self.policy.model.path)
        check_engine(config, self.world_size)
        ranks = ranks_per_engine(config)
        self._register_dispatch_collect_info(
            MESH, self.rank // ranks, is_collect=self.rank % ranks == 0
        )
        self._run_config = config
        sends_changed = self.config.weight_sync == "changed"
        takes_changes = sends_changed and not takes_adapter(self.policy)
        if takes_changes:
            from workers.weights.host_copy import HostCopy

            self.copy = HostCopy()
        self.players: Players | None = None
        if has_environment(config):
            from workers.agents.players import Players

            tokenizer = tokenizer_of(self.policy.model.path)
            set_template_variables(tokenizer, config.data.apply_chat_template_kwargs)
            self.players = Players(config.environment, tokenizer)
        self._requests: dict[int, int] = {}
        """By a sample's number in the engine: the `request` that `submit` received with its row."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self, reads_images: bool = False) -> None:
        """Build the engine, which cannot generate before the first sync.

        With `reads_images`, vLLM loads the vision tower. If the actor is in the same process, call
        this after the actor's `init_model`.
        """
        self.open_process_group()
        self.engine = build_engine(self._run_config, self, reads_images)
        self.engine.model_path = self.policy.model.path

    def close(self) -> None:
        """Close the engine, if there is one."""
        if hasattr(self, "engine"):
            self.engine.close()

    @register(dispatch_mode=ROLLOUT_DISPATCH, readonly=True)
    @batch_columns(reads=("input_ids", "attention_mask", IMAGES, *NAMED))
    @followed_by_ranks
    def generate_sequences(self, data: DataProto) -> DataProto:
        """Return one response per row.

        `meta_info` must have `pad_token_id`, and `eos_token_id` unless the model's folder names an
        eos. It may override the sampling settings.
        """
        if self._requests:
            raise RolloutError(
                f"rollout: this rank is generating {len(self._requests)} samples. Take or abort "
                "them first."
            )
        numbers = self._begin(data)
        results = (self.players or self.engine).collect()
        return self._batch_of([results[number] for number in numbers], len(data))

    @register(dispatch_mode=SUBMIT_DISPATCH, readonly=True, blocking=False)
    @followed_by_ranks
    def submit(self, data: DataProto) -> None:
        """Start generating samples of these rows; `collect` returns them, with `request`."""
        require(data, REQUEST)
        numbers = self._begin(data)
        requests = data.padded(REQUEST)[: len(numbers)].tolist()
        self._requests |= dict(zip(numbers, requests, strict=True))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    @followed_by_ranks
    def collect(
        self, max_tokens: int | None = None, seconds: float | None = None
    ) -> DataProto | None:
        """Generate until all samples are finished; return the finished ones, or None.

        Return earlier once a sample has `max_tokens` more tokens, or after `seconds`.
        """
        try:
            results = (self.players or self.engine).collect(max_tokens, seconds)
        except BaseException:
            self._requests = {}
            raise
        if not results:
            return None
        requests = torch.tensor([self._requests.pop(number) for number in results])
        batch = self._batch_of(list(results.values()), len(results))
        return batch.union(DataProto.from_dict({REQUEST: requests}))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @followed_by_ranks
    def abort(self) -> None:
        """Drop all samples that were submitted but not taken."""
        if self.players is not None:
            self.players.abort()
        self.engine.abort()
        self._requests = {}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def follow(self) -> None:
        """Run this rank's part of one call that the engine's first rank leads."""
        self.engine.follow()

    def _begin(self, data: DataProto) -> list[int]:
        """Submit the rows that are not padding; return their samples' numbers in the engine."""
        pad, sampling = data.meta_info.get("pad_token_id"), self.sampling_of(data)
        if pad is None:
            raise RolloutError(
                "rollout: meta_info has no pad_token_id. Set it to the tokenizer's pad token, or "
                "to its eos if it has none, as the trainer's data loader does."
            )
        if IMAGES in data.non_tensor_batch:  # no sample reads an image token without an image
            stops = (*sampling.stop_token_ids, *self.engine.image_reader.stop_ids)
            sampling = replace(sampling, stop_token_ids=stops)
        attempt = data.meta_info.get("attempt", 0)
        stream = "validate" if data.meta_info.get("validate") else "train"
        seed_of = partial(sample_seed, self.seed, attempt=attempt, stream=stream)
        if self.players is None:
            samples = read_samples(data, self.prompt_width, seed_of)
            numbers = self.engine.submit(samples, sampling)
        else:
            numbers = self.players.submit(data, self.engine, sampling, seed_of)
        self._sampling, self._pad = sampling, int(pad)
        self._has_images = IMAGES in data.non_tensor_batch
        return numbers

    def _batch_of(self, results: Sequence[Sample | Trajectory], num_rows: int) -> DataProto:
        """Return samples or trajectories as a batch of `num_rows` rows, padded at the end."""
        sampling, pad = self._sampling, self._pad
        samples = [r if isinstance(r, Sample) else r.sample for r in results]
        samples += [Sample([pad], finish_reason="pad")] * (num_rows - len(samples))
        batch = to_batch(
            samples,
            (self.prompt_width, self.response_width),
            pad,
            self.engine.version or 0,
            sampling.truncated_log_probs,
            self.engine.no_choices() if sampling.routed_experts else None,
        )
        if self.players is None:
            return batch
        from workers.agents.players import trajectory_columns

        if self._has_images:
            images = object_rows([sample.images for sample in samples])
            batch = batch.union(DataProto.from_dict({}, {IMAGES: images}))
        played = [result for result in results if not isinstance(result, Sample)]
        return batch.union(trajectory_columns(batch, played))

    def sampling_of(self, data: DataProto) -> SamplingParams:
        """Return the sampling settings of the config, overridden by those of the batch.

        Validation uses `val_kwargs`, and of `sampling_kwargs` only the stop settings. In every
        engine, a response ends at the tokenizer's eos (from the batch), at the eos ids of the
        model's folder, and at `sampling_kwargs.stop_token_ids`.
        """
        eos = data.meta_info.get("eos_token_id")
        ids = [eos] if isinstance(eos, int) else eos or ()
        stop = (*map(int, ids), *self.model_eos)
        if not stop:
            raise RolloutError(
                "rollout: neither meta_info nor the model's generation_config.json has an "
                "eos_token_id, which ends responses. Set meta_info['eos_token_id'], or use a "
                "tokenizer that has an eos token."
            )

        names = ("temperature", "top_k", "top_p", "do_sample")
        validates = bool(data.meta_info.get("validate"))
        section = self.config.validation if validates else self.config
        settings = {name: getattr(section, name) for name in names}
        for name, value in self.config.sampling_kwargs.items():
            if name in STOPS or not validates:
                settings[name] = value
        overrides = {*names, "max_tokens", *EXTRA_SAMPLING} & data.meta_info.keys()
        settings |= {name: data.meta_info[name] for name in overrides}
        sampling = sampling_params(settings, self.response_width, stop)
        return replace(sampling, routed_experts=replays_routing(self.policy) and not validates)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def update_weights(self, version: int) -> SyncReport:
        """Load the weights of the actor in this process, by reference or as a copy.

        The version of a copy changes only if every rank has verified its part.
        """
        actor: Any = self.sibling("actor")
        if actor is None:
            raise WeightSyncError(
                "rollout.update_weights: no actor is in this process. Call sync_weights in the "
                "driver."
            )
        self.engine.wake_up()
        if not self.engine.owns_weights:
            if getattr(self.engine, "module", None) is not actor.engine.module:
                raise WeightSyncError(
                    "the actor was built again after the rollout; call rollout.init_model again."
                )
            self.engine.commit(version)
            return SyncReport()
        error: str | None = None
        try:
            if actor.sends_adapter:
                tensors = actor.engine.full_trained_tensors()
            else:
                tensors = actor.engine.named_full_tensors(dtype=actor.sent_dtype)
            self.engine.load_weights(tensors)
        except WeightSyncError as problem:
            error = f"rollout rank {self.rank}: {problem}"
        num_errors = torch.tensor([0 if error is None else 1])
        if self.world_size > 1:
            dist.all_reduce(num_errors)
        if int(num_errors) == 0:
            self.engine.commit(version)
        return SyncReport(error, self.engine.num_bytes)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def weights_checksum(self) -> str:
        """Return a hash of the full weights, comparable with the actor's."""
        return self.engine.weights_checksum()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sleep(self) -> None:
        """Free memory for training; most engines with their own copy of the weights discard it."""
        self.engine.sleep()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def wake_up(self) -> None:
        """Allocate the memory that `sleep` freed."""
        self.engine.wake_up()


class SamplerWorker(RolloutWorker):
    """Generates with the weights of the model's folder, in a run without training.

    The weight version of its samples is 0.
    """

    is_frozen = True

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self, reads_images: bool = False) -> None:
        """Build the engine and load the folder's weights into it."""
        super().init_model(reads_images)
        waits_for_weights = self.config.name == "vllm"
        loaded = self.engine.named_weights()  # native and hf have read the folder already
        self.engine.load_weights(self.folder_weights() if waits_for_weights else loaded)
        self.engine.commit(0)

    def folder_weights(self) -> Iterable[tuple[str, Tensor]]:
        """Return the folder's weights in the engine's dtype, in host memory."""
        return named_state(load_module(self.policy, self.device.type, torch.device("cpu")))
