"""The rollout: the policy generating.

Where its weights live:

    beside the actor, whole      the native engine decodes with the actor's module, by reference
    beside the actor, sharded    one unsharded copy per version, gathered tensor by tensor; so, too,
                                 where `rollout.dtype` is another type than the weights'
    in a pool of its own         a copy that the actor fills through `workers.weights.channel`

Decoding issues no collective: ranks decode different numbers of steps. Ranks that share an engine
(tensor parallelism) get the same rows, and the first of them answers.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from verl_like.batch.protocol import DataProto
from verl_like.calls.dispatch import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl_like.errors import RolloutError, WeightSyncError
from verl_like.process.worker import Worker
from workers.columns import require
from workers.models.folder import generation_eos
from workers.rollout.base import Output, Request, SamplingParams
from workers.rollout.build import build_engine, check_engine, ranks_per_engine
from workers.rollout.partial import partial_outputs
from workers.rollout.sampling import noise_key
from workers.rollout.sampling_settings import EXTRA_SAMPLING, STOPS, sampling_params
from workers.weights.channel import Channel
from workers.weights.host_copy import host_copy
from workers.weights.sync import SyncReport, WeightReceiver

if TYPE_CHECKING:
    from workers.config import WorkersConfig

MESH = "rollout"
"""Ranks with one data rank share an engine."""


class RolloutWorker(WeightReceiver, Worker):
    """Turns prompts into samples, each the same wherever it is made.

    A sample's noise is keyed by seed, uid and sample index.
    """

    def __init__(self, config: WorkersConfig) -> None:
        super().__init__()
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
        self.copy = host_copy(self.config)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Build the engine, which is stale until the first sync.

        Beside an actor: after the actor's `init_model`.
        """
        self.open_process_group()
        self.engine = build_engine(self._whole_config, self)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(MESH), readonly=True)
    def generate_sequences(self, data: DataProto) -> DataProto:
        """One response per row, or the rest of one: see `workers.rollout.partial`.

        `meta_info` carries the ids of eos and pad, and may override the sampling settings.
        """
        require(data, "input_ids", "attention_mask", "position_ids", "sample_index", "uid")
        sampling, pad = self.sampling_of(data), data.meta_info.get("pad_token_id")
        if pad is None:
            raise RolloutError(
                "rollout: meta_info has no pad_token_id; the data loader sets it (pad, else eos)."
            )
        outputs = self.engine.generate(self.requests_of(data), sampling)
        columns = response_columns(
            data, outputs, self.response_width, int(pad), sampling.truncated_log_probs
        )
        columns["weights_id"] = torch.full((len(data),), self.engine.weights_id)
        columns["policy_version"] = oldest_versions(outputs, len(data), self.engine.version or 0)
        reasons = [output.finish_reason for output in outputs]
        return DataProto.from_dict(
            columns, {"finish_reason": reasons + ["pad"] * (len(data) - len(reasons))}
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, past_queue=True)
    def receive_weights_now(self, address: str, version: int) -> SyncReport:
        """`receive_weights` in the middle of a generation, which goes on with them.

        It stands still from the first of them, or with `rollout.double_buffer` once all are here,
        until the vote. Its later tokens are of the new version; where a rank has refused the
        weights, it ends with an error instead.
        """
        if not self.engine.can_take_weights_in_flight:
            raise WeightSyncError(
                f"rollout: {type(self.engine).__name__} takes no weights within a generation; "
                "receive_weights brings them between two."
            )
        with ExitStack() as standing:

            def take(channel: Channel) -> list[str]:
                if self.copy is None:
                    standing.enter_context(self.engine.control.held())
                    return self._load(channel)
                problems = self._keep(channel)  # while the engine goes on
                if not problems:
                    standing.enter_context(self.engine.control.held())
                    problems = self._load_copy()
                return problems

            return self._receive(address, take, lambda: self.engine.commit(version))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, past_queue=True)
    def pause(self) -> None:
        """Hold the generation in flight, or the next; returns when it stands still."""
        self.engine.control.pause()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, past_queue=True)
    def resume(self) -> None:
        """Let it go on."""
        self.engine.control.resume()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, past_queue=True)
    def abort(self) -> None:
        """End the generation in flight: it returns what it has.

        Unfinished samples have the finish reason "abort".
        """
        if hasattr(self, "engine"):  # one that is being built generates nothing
            self.engine.control.abort()

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
        per_call = "max_new_tokens_per_call"
        settings = {name: getattr(self.config, name) for name in (*names, per_call)}
        if validates:
            settings = {name: getattr(self.config.val_kwargs, name) for name in names}
        for name, value in self.config.sampling_kwargs.items():
            if name in STOPS or not validates:
                settings[name] = value
        own = {*names, "max_tokens", per_call, *EXTRA_SAMPLING} & data.meta_info.keys()
        settings |= {name: data.meta_info[name] for name in own}
        return sampling_params(settings, self.response_width, stop)

    def requests_of(self, data: DataProto) -> list[Request]:
        """The prompts of the real rows, without padding."""
        ids = data.batch["input_ids"]
        mask = data.batch["attention_mask"].bool()
        indices = data.batch["sample_index"]
        if ids.shape[1] != self.prompt_width:
            raise RolloutError(
                f"rollout: prompts are {ids.shape[1]} columns wide, data.max_prompt_length is "
                f"{self.prompt_width}; pad them to that width on the left (and do not generate a "
                "batch twice)."
            )
        attempt = data.meta_info.get("attempt", 0)
        stream = "validate" if data.meta_info.get("validate") else "train"

        requests = []
        for row, partial in enumerate(partial_outputs(data)):
            uid, index = str(data.non_tensor_batch["uid"][row]), int(indices[row])
            key = noise_key(self.seed, uid, index, attempt, stream)
            prompt, name = ids[row][mask[row]].tolist(), f"uid {uid} sample {index}"
            requests.append(Request(prompt, key, name, partial))
        return requests

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
        """Allocate it again."""
        self.engine.wake_up()


def oldest_versions(outputs: list[Output], rows: int, current: int) -> Tensor:
    """[rows]: the version of each response's oldest token; of an empty one the engine's own."""
    oldest = torch.full((rows,), current, dtype=torch.long)
    for row, output in enumerate(outputs):
        if len(output.versions):
            oldest[row] = int(output.versions.min())
    return oldest


def response_columns(
    data: DataProto, outputs: list[Output], width: int, pad: int, truncated: bool = False
) -> dict[str, Tensor]:
    """The columns that `generate_sequences` writes; pad rows get an empty response."""
    prompts, prompt_mask = data.batch["input_ids"], data.batch["attention_mask"]
    rows = len(prompts)
    responses = torch.full((rows, width), pad, dtype=torch.long)
    log_probs = torch.zeros((rows, width))
    optional = {"rollout_truncated_log_probs": torch.zeros((rows, width))} if truncated else {}
    versions = torch.zeros((rows, width), dtype=torch.int32)
    lengths = torch.zeros(rows, dtype=torch.long)

    for row, output in enumerate(outputs):
        lengths[row] = count = len(output.tokens)
        responses[row, :count] = output.tokens
        log_probs[row, :count] = output.log_probs
        versions[row, :count] = output.versions
        for column in optional.values():
            column[row, :count] = output.truncated_log_probs

    columns = torch.arange(width)
    response_mask = (columns < lengths[:, None]).long()
    positions = data.batch["position_ids"]
    return {
        "prompts": prompts.clone(),
        "responses": responses,
        "input_ids": torch.cat([prompts, responses], dim=1),
        "attention_mask": torch.cat([prompt_mask, response_mask], dim=1),
        "position_ids": torch.cat([positions, positions[:, -1:] + 1 + columns], dim=1),
        "response_mask": response_mask,
        "rollout_log_probs": log_probs,
        "token_versions": versions,
        **optional,
    }
