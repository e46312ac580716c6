"""Convert sampling settings of the configuration and `meta_info` into `SamplingParams`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

from verl_like.errors import ConfigError, nearest
from workers.rollout.base import SamplingParams

if TYPE_CHECKING:
    from workers.config import RolloutConfig

DRAWN_BY = ("temperature", "top_k", "top_p")
"""Settings that affect sampling; without effect in greedy decoding."""

STOPS = ("stop_strings", "stop_token_ids")
"""Settings that end a response; the only training settings that validation uses."""
EXTRA_SAMPLING = ("min_p", "min_tokens", *STOPS, "logit_bias", "truncated_log_probs")
"""Fields that `rollout.sampling_kwargs` may set."""


def _is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "min_p": (_is_number, "a number from 0 to 1"),
    "min_tokens": (_is_whole, "a whole number"),
    "truncated_log_probs": (lambda value: isinstance(value, bool), "true or false"),
}
"""Test and description of the values of these fields."""


def sampling_params(
    settings: dict[str, Any], max_tokens: int, stop_token_ids: tuple[int, ...]
) -> SamplingParams:
    """Parse settings of the configuration and `meta_info`: lists, a table for the bias.

    Their stop ids are added to `stop_token_ids`, the model's.
    """
    settings = {"max_tokens": max_tokens, **settings}
    for name, (is_valid, rule) in KINDS.items():
        if name in settings and not is_valid(settings[name]):
            raise _refusal(name, settings[name], rule)
    stops = (*stop_token_ids, *_stop_ids_in(settings))
    settings["stop_token_ids"] = tuple(dict.fromkeys(stops))
    settings["stop_strings"] = _stop_strings_in(settings)
    settings["logit_bias"] = _biases_in(settings)
    return SamplingParams(**settings)


def _refusal(name: str, value: Any, what: str) -> ConfigError:
    return ConfigError(f"rollout.sampling_kwargs.{name}={value} cannot work; it must be {what}.")


def _stop_ids_in(settings: dict[str, Any]) -> tuple[int, ...]:
    ids = settings.get("stop_token_ids", ())
    ids = ids if isinstance(ids, Iterable) and not isinstance(ids, str) else (ids,)
    if not all(_is_whole(token) and token >= 0 for token in ids):
        what = "token ids, such as [32007]; for text there is stop_strings"
        raise _refusal("stop_token_ids", list(ids), what)
    return tuple(ids)


def _stop_strings_in(settings: dict[str, Any]) -> tuple[str, ...]:
    """Return the stop strings, from one text or several."""
    texts = settings.get("stop_strings", ())
    texts = (texts,) if isinstance(texts, str) else texts
    if not isinstance(texts, Iterable) or not all(isinstance(text, str) for text in texts):
        raise _refusal("stop_strings", texts, "a text or a list of texts, such as ['</s>']")
    return tuple(texts)


def _biases_in(settings: dict[str, Any]) -> tuple[tuple[int, float], ...]:
    bias = settings.get("logit_bias", {})
    try:
        return tuple((int(token), float(value)) for token, value in dict(bias).items())
    except (TypeError, ValueError):
        what = "a number for each of some token ids, such as {32007: -5}"
        raise _refusal("logit_bias", bias, what) from None


def check_sampling(config: RolloutConfig, max_tokens: int) -> None:
    """Reject settings of training and of validation that make sampling impossible."""
    for name in config.sampling_kwargs:
        if name not in EXTRA_SAMPLING:
            valid = ", ".join(EXTRA_SAMPLING)
            raise ConfigError(
                f"rollout.sampling_kwargs names {name!r}; valid: "
                f"{valid}.{nearest(name, EXTRA_SAMPLING)}"
            )
    sections = {"rollout": config, "rollout.val_kwargs": config.validation}
    for name, section in sections.items():
        drawn = {key: getattr(section, key) for key in DRAWN_BY} if section.do_sample else {}
        try:
            sampling_params(config.sampling_kwargs | drawn, max_tokens, (0,))
        except ConfigError as error:
            raise ConfigError(f"actor_rollout_ref.{name}: {error}") from error
