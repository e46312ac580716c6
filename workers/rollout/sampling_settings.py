"""Sampling as configuration and `meta_info` spell it, turned into `SamplingParams`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from verl_like.errors import ConfigError, nearest
from workers.rollout.base import SamplingParams

if TYPE_CHECKING:
    from workers.config import RolloutConfig

DRAWN_BY = ("temperature", "top_k", "top_p")
"""What decides a draw; of no effect in greedy decoding."""

STOPS = ("stop_strings", "stop_token_ids")
"""Where a response ends, however it is sampled: of a training's settings all that validation reads.
"""
EXTRA_SAMPLING = ("min_p", "min_tokens", *STOPS, "logit_bias", "truncated_log_probs")
"""Fields that `rollout.sampling_kwargs` may set."""


def sampling_params(
    settings: dict[str, Any], max_tokens: int, stop_token_ids: tuple[int, ...]
) -> SamplingParams:
    """From settings as configuration and `meta_info` spell them: lists, a table for the bias.

    Their stop ids are added to `stop_token_ids`, those of the model.
    """
    settings = {"max_tokens": max_tokens, **settings}
    stops = (*stop_token_ids, *_stop_ids_in(settings))
    settings["stop_token_ids"] = tuple(dict.fromkeys(stops))
    settings["stop_strings"] = tuple(settings.get("stop_strings", ()))
    bias = dict(settings.get("logit_bias", {}))
    settings["logit_bias"] = tuple((int(token), float(value)) for token, value in bias.items())
    return SamplingParams(**settings)


def _stop_ids_in(settings: dict[str, Any]) -> tuple[int, ...]:
    ids = settings.get("stop_token_ids", ())
    ids = (ids,) if isinstance(ids, int) else tuple(ids)
    if not all(isinstance(token, int) and token >= 0 for token in ids):
        raise ConfigError(
            f"rollout.sampling_kwargs.stop_token_ids={list(ids)} cannot work; it must be token "
            "ids, such as [32007]; for text there is stop_strings."
        )
    return ids


def check_sampling(config: RolloutConfig, max_tokens: int) -> None:
    """Refuse settings of training and of validation that nothing could be drawn by."""
    for name in config.sampling_kwargs:
        if name not in EXTRA_SAMPLING:
            valid = ", ".join(EXTRA_SAMPLING)
            raise ConfigError(
                f"rollout.sampling_kwargs names {name!r}; valid: "
                f"{valid}.{nearest(name, EXTRA_SAMPLING)}"
            )
    sections = {"rollout": config, "rollout.val_kwargs": config.val_kwargs}
    for name, section in sections.items():
        drawn = {key: getattr(section, key) for key in DRAWN_BY} if section.do_sample else {}
        try:
            sampling_params(config.sampling_kwargs | drawn, max_tokens, (0,))
        except ConfigError as error:
            raise ConfigError(f"actor_rollout_ref.{name}: {error}") from error
