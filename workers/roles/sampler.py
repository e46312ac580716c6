"""The rollout of a run without training: it uses the weights of the model's folder."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from verl_like.calls.dispatch import Dispatch, register
from workers.models.load import load_model
from workers.models.precision import name_of, precision_of, rollout_dtype
from workers.models.state import named_state, set_buffer_dtype
from workers.roles.rollout import RolloutWorker


class SamplerWorker(RolloutWorker):
    """Generates with a fixed model; its samples have version 0."""

    is_frozen = True

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Build the engine, with the folder's weights."""
        super().init_model()
        waits_for_weights = self.config.name == "vllm"
        loaded = self.engine.named_weights()  # native and hf have read the folder already
        self.engine.load_weights(self.folder_weights() if waits_for_weights else loaded)
        self.engine.commit(0)

    def folder_weights(self) -> Iterable[tuple[str, Tensor]]:
        """Return the folder's weights in the engine's type, in host memory."""
        dtype = rollout_dtype(self.policy, self.device.type)
        model = replace(self.policy.model, dtype=name_of(dtype), compute_dtype=name_of(dtype))
        module = load_model(model, "token", torch.device("cpu"))
        set_buffer_dtype(module, precision_of(self.policy.model, self.device.type).weights)
        return named_state(module)
