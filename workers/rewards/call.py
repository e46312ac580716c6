"""How a reward function is called: by keyword, with the fields of a sample that it asks for.

    call = Call.of(function, kwargs)        # refuses a parameter that nothing fills
    call(sample)                            # of one sample
    call.whole_batch(samples)               # of a function whose parameters are plurals

Nothing here imports torch: it runs in reward processes, which start often.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from verl_like.errors import ConfigError

Sample = dict[str, Any]
"""What a reward function may read of a sample, by the names in `SAMPLE_FIELDS`."""
SAMPLE_FIELDS = {
    "data_source": "the data set that the prompt is from",
    "solution_str": "the response as text",
    "ground_truth": "the row's reward_model.ground_truth",
    "extra_info": "the row's extra_info",
    "raw_prompt": "the prompt as the row has it: text, or a conversation",
    "uid": "the prompt's row and epoch",
    "num_tokens": "tokens of the response",
}
"""Parameter of a reward function -> what it gets; in the plural, a list over the whole batch."""
_PLURALS = {f"{name}s": name for name in SAMPLE_FIELDS}


@dataclass(frozen=True)
class Call:
    """A reward function with what each of its calls gets."""

    function: Callable[..., Any]
    fields: tuple[str, ...]
    kwargs: dict[str, Any]
    takes_batches: bool = False
    """Whether one call scores a whole batch and returns a list."""

    @classmethod
    def of(cls, function: Callable[..., Any], kwargs: dict[str, Any]) -> Call:
        """The call of a function with these keyword arguments of the configuration's."""
        try:
            parameters = inspect.signature(function).parameters
        except (TypeError, ValueError):  # written in C: it says nothing of itself
            return cls(function, tuple(SAMPLE_FIELDS), kwargs)

        takes_batches = "solution_strs" in parameters
        known = _PLURALS if takes_batches else dict.fromkeys(SAMPLE_FIELDS)
        for parameter in parameters.values():
            _check_filled(parameter, {*known, *kwargs})

        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            return cls(function, tuple(known), kwargs, takes_batches)
        fields = tuple(name for name in parameters if name in known)
        return cls(function, fields, kwargs, takes_batches)

    @property
    def runs_side_by_side(self) -> bool:
        """Whether calls wait without computing, so that many go at the same time."""
        return inspect.iscoroutinefunction(self.function)

    def __call__(self, sample: Sample) -> Any:
        """What the function says of a sample; a coroutine of one of its kind."""
        read = {name: sample[name] for name in self.fields if name in sample}
        return self.function(**(read | self.kwargs))

    def whole_batch(self, samples: Sequence[Sample]) -> Any:
        """What the function says of all samples at once."""
        read = {}
        for name in self.fields:
            read[name] = [sample.get(_PLURALS[name]) for sample in samples]
        return self.function(**(read | self.kwargs))


def _check_filled(parameter: inspect.Parameter, known: Collection[str]) -> None:
    if parameter.kind is parameter.POSITIONAL_ONLY:
        raise ConfigError(
            f"the reward function's parameter {parameter.name!r} takes no keyword, and functions "
            "are called by keyword: drop the / from its signature."
        )

    takes_many = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    has_default = parameter.default is not parameter.empty
    if not (takes_many or has_default or parameter.name in known):
        raise ConfigError(
            f"nothing fills the reward function's parameter {parameter.name!r}. Functions are "
            f"called by keyword with {', '.join(SAMPLE_FIELDS)} (or, for a whole batch, "
            "solution_strs and the other plurals), and what reward_kwargs has: rename it, or give "
            "it a default."
        )
