"""The workers of `verl-like serve`, which train several states for many clients.

A state is one client's weights (usually LoRA adapters), gradients and optimizer moments.

    actor.add_state("alice", 8); actor.use_state("alice")
    actor.forward_backward(rows, "importance_sampling")     # `workers.losses.token_sums`
    actor.optim_step(OptimStepSettings(lr=1e-4))
    actor.copy_state("alice", "sampler"); actor.use_state("sampler")
    sync_weights(actor, rollout, version)                   # in every placement
    rollout.generate_sequences(rows)

The rollout always has its own copy of the weights, with merged adapters. So samples come from one
snapshot while training continues, in every placement.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

from verl_like.batch.protocol import DataProto
from verl_like.calls.dispatch import Dispatch, register
from verl_like.config_key import settable_arguments
from verl_like.errors import ConfigError, nearest
from workers.config import ActorConfig, WorkersConfig
from workers.losses.aggregate import LossAndMetrics
from workers.losses.registry import POLICY_LOSSES, get_policy_loss, traits_of
from workers.losses.token_sums import POLICY, TOKEN_SUMS, WEIGHTS, LossInputs, TokenSum
from workers.roles.actor import ActorWorker
from workers.roles.critic import CriticWorker
from workers.roles.model_worker import LossFactory, ModelWorker
from workers.roles.rollout import RolloutWorker
from workers.rollout.base import SamplingParams
from workers.rollout.build_engine import tokenizer_of
from workers.training.engine import TrainEngine
from workers.training.loss import Loss
from workers.training.microbatch import Columns, MiniBatch
from workers.training.optim import CONFIGURED, OptimStepSettings
from workers.training.trained_states import TrainedStates

LOSS_PREFIX = "verl_like:"
"""Prefix by which a client requests one of this package's policy losses."""
SETTINGS = "loss_settings"
"""Key in a batch's meta_info for the settings of its loss."""
MASK = WEIGHTS
"""Column that marks the tokens in the loss, for the losses of this package."""
VALUE = f"{LOSS_PREFIX}value"
"""Name of the critic's loss in a client's request."""
VALUE_SETTINGS = ("cliprange_value", "loss_agg_mode")
NO_FORMULA = (
    "the loss stable_reinforce has no public formula, so this server cannot compute it. Set "
    "loss_fn=importance_sampling, ppo or cispo; or start the server with --stable-reinforce=NAME, "
    "which computes the loss NAME instead and says so."
)


def client_loss(name: str, role: str = "actor") -> LossInputs:
    """Return the columns that a client's loss reads; reject a name that the role does not have."""
    losses: dict[str, LossInputs] = {**TOKEN_SUMS}
    for policy_loss in POLICY_LOSSES:
        losses[f"{LOSS_PREFIX}{policy_loss}"] = LossInputs((*POLICY, MASK))
    if role == "critic":
        losses = {VALUE: LossInputs(("values", "returns", MASK))}
    elif name == "stable_reinforce":
        raise ConfigError(NO_FORMULA)
    if name not in losses:
        raise ConfigError(
            f"the {role} has no loss {name!r}.{nearest(name, losses)} Known: {', '.join(losses)}."
        )
    return losses[name]


class TrainsStates(ModelWorker):
    """A trained role with several states; passes, steps and checkpoints use the selected one."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self, total_steps: int = 0) -> None:
        """Load the model, whose weights are the start of every state."""
        super().init_model(total_steps)
        self.states = TrainedStates(self.engine)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def add_state(
        self, name: str, rank: int, seed: int | None = None, frozen: Sequence[str] = ()
    ) -> None:
        """Add a state with the model's initial weights.

        `rank` is the LoRA rank of its adapters; 0 trains all weights. Its parameters in `frozen`
        are not trained: any of "attn", "unembed" and "mlp", which is everything else.
        """
        names = [n for n in self.states.parameters if _part_of(n) in frozen]
        if len(names) == len(self.states.parameters):
            parts = " and ".join(f"train_{part}" for part in sorted({*map(_part_of, names)}))
            raise ConfigError(
                "the model would train nothing: the request leaves out all trained weights of "
                f"this server, which belong to {parts}. Set one of them to true."
            )
        self.states.add(name, rank, seed, frozenset(names))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def use_state(self, name: str) -> None:
        """Select the state that later passes, steps and checkpoints use."""
        self.states.use(name)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def copy_state(self, source: str, name: str) -> None:
        """Copy the weights of a state to a state of another name."""
        self.states.copy(source, name)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def drop_state(self, name: str) -> None:
        """Delete a state."""
        self.states.drop(name)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def clear_gradients(self, forget_moments: bool = False) -> None:
        """Clear the gradients of the selected state; with `forget_moments`, also its moments."""
        self.states.clear_gradients(forget_moments)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def optim_step(self, settings: OptimStepSettings = CONFIGURED) -> dict[str, Any]:
        """Take an optimizer step on the selected state, except for its frozen parameters."""
        with self.states.without_frozen():
            return super().optim_step(settings)


class ServedActorWorker(TrainsStates, ActorWorker):
    """Trains the policy in the selected state."""

    lends_module = False
    """False: a rollout in the same process has its own copy of the module."""

    def __init__(self, config: WorkersConfig) -> None:
        super().__init__(config)
        self.temperature = 1.0

    def losses(self) -> dict[str, LossFactory]:
        """Return the actor's losses, the token sums, and policy losses as `verl_like:<name>`."""
        sums = {name: partial(sum_loss, loss) for name, loss in TOKEN_SUMS.items()}
        ours = {f"{LOSS_PREFIX}{name}": partial(self._policy_loss, name) for name in POLICY_LOSSES}
        return {**super().losses(), **sums, **ours}

    def _policy_loss(self, name: str, data: DataProto) -> Loss:
        """Return a policy loss of this package for a client's rows."""
        policy_loss = get_policy_loss(name)
        config, arguments = policy_settings(name, self.config, data.meta_info.get(SETTINGS, {}))

        def compute(outputs: Columns, columns: Columns, batch: MiniBatch) -> LossAndMetrics:
            loss, metrics = policy_loss(
                old_log_prob=columns["logprobs"],
                log_prob=outputs["log_probs"],
                advantages=columns["advantages"],
                response_mask=columns[MASK],
                loss_agg_mode=config.loss_agg_mode,
                config=config,
                rollout_is_weights=None,
                **arguments,
                **batch.denominators,
            )
            return loss, {"loss": loss, **metrics}

        return Loss(name, compute, ("logprobs", "advantages", MASK))


class ServedCriticWorker(TrainsStates, CriticWorker):
    """Trains the value model in the selected state."""

    engine: TrainEngine

    def losses(self) -> dict[str, LossFactory]:
        """Return the loss of `update_critic`, and its variant for a client's rows."""
        return {**super().losses(), VALUE: self._value_loss}

    def _value_loss(self, data: DataProto) -> Loss:
        """Return the value loss with the settings of the request."""
        settings = data.meta_info.get(SETTINGS, {})
        for name in settings:
            if name not in VALUE_SETTINGS:
                raise ConfigError(
                    f"the loss {VALUE} has no setting {name!r}; it has "
                    f"{', '.join(VALUE_SETTINGS)}.{nearest(name, VALUE_SETTINGS)}"
                )
        config = replace(self.config, **settings)

        def compute(outputs: Columns, columns: Columns, batch: MiniBatch) -> LossAndMetrics:
            masked = {**columns, "response_mask": columns[MASK]}
            loss, metrics = self.loss(outputs, masked, batch, config)
            return loss, {"loss": loss, **metrics}

        return Loss("value", compute, ("values", "returns", MASK))


class ServedRolloutWorker(RolloutWorker):
    """Generates with the sampling parameters of each batch instead of the configured ones."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self, reads_images: bool = False) -> None:
        """Build the engine, and let it decode text to look for stop strings."""
        super().init_model(reads_images)
        tokenizer = tokenizer_of(self.policy.model.path)
        self.engine.decode = partial(tokenizer.decode, skip_special_tokens=False)

    def sampling_of(self, data: DataProto) -> SamplingParams:
        """Return the sampling parameters in the batch's meta_info."""
        return SamplingParams(**data.meta_info["sampling"])


def sum_loss(loss: TokenSum, data: DataProto) -> Loss:
    """Return the loss that sums `loss` over tokens, with the settings of this batch."""
    settings = data.meta_info.get(SETTINGS, {})
    optional = [name for name in loss.optional_columns if name in data.columns]
    names = list(dict.fromkeys([*loss.columns, *optional]))

    def compute(outputs: Columns, columns: Columns, batch: MiniBatch) -> LossAndMetrics:
        log_probs = outputs["log_probs"]
        total = loss.of_tokens(log_probs, columns, loss.settings | settings).sum()
        metrics = {"loss": total}
        if "logprobs" in loss.columns:
            inside = columns["advantages"] != 0
            gaps = (log_probs.detach() - columns["logprobs"]).abs()
            metrics["sampler_gap"] = gaps.masked_fill(~inside, 0).sum()
            metrics["num_tokens"] = inside.sum()
        return total, metrics

    return Loss("token_sum", compute, names)


def policy_settings(
    name: str, config: ActorConfig, client_settings: Mapping[str, Any]
) -> tuple[ActorConfig, dict[str, Any]]:
    """Apply a client's settings to the actor's config and to the loss's arguments; return both."""
    policy_loss = get_policy_loss(name)
    takes = {**settable_arguments(policy_loss)}
    keys = {key.name for key in fields(config)}
    for setting in client_settings:
        if setting not in keys and setting not in takes:
            known = [*takes, "loss_agg_mode", *(traits_of(policy_loss).keys_read or ())]
            raise ConfigError(
                f"the loss {LOSS_PREFIX}{name} has no setting {setting!r}; it has "
                f"{', '.join(known)}.{nearest(setting, known)}"
            )
    arguments = {key: value for key, value in client_settings.items() if key in takes}
    changes = {key: value for key, value in client_settings.items() if key not in takes}
    return replace(config, **changes), {**config.policy_loss.args, **arguments}


def _part_of(name: str) -> str:
    """Return the part of the model that a parameter belongs to: "mlp", "attn" or "unembed"."""
    layers = name.split(".")
    if any(layer in ("lm_head", "embed_out", "output") for layer in layers):
        return "unembed"
    return "attn" if any("attn" in layer or "attention" in layer for layer in layers) else "mlp"
