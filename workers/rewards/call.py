"""How a reward function is called: by keyword, with the fields of a sample that it asks for.

    call = Call.of(function, kwargs, columns)   # refuses a parameter that nothing fills
    call(sample)                                # of one sample
    call.whole_batch(samples)                   # of a function whose parameters are plurals

Nothing here imports torch: it runs in reward processes, which start often.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from verl_like.errors import ConfigError

Sample = dict[str, Any]
"""What a reward function may read of a sample, by the names in `SAMPLE_FIELDS` and by those of the
row's other columns.
"""
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
TRUTH = "ground_truth"
SHORT_NAMES = {"prompt": "raw_prompt", "response": "solution_str"}
"""Other parameters -> the field that they get."""
SHORT_PLURALS = [f"{name}s" for name in SHORT_NAMES]
BATCH_MARKS = ("solution_strs", "responses")
"""A function with one of these parameters scores a whole batch in one call."""


@dataclass(frozen=True)
class Call:
    """A reward function with what each of its calls gets."""

    function: Callable[..., Any]
    fields: dict[str, str]
    """Parameter -> the entry of a sample that it gets."""
    kwargs: dict[str, Any]
    takes_batches: bool = False
    """Whether one call scores a whole batch and returns a list."""
    takes_rest: bool = False
    """Whether it gets all other entries of a sample by their names."""

    @classmethod
    def of(
        cls,
        function: Callable[..., Any],
        kwargs: dict[str, Any],
        columns: Sequence[str] = (),
        has_truth: bool = True,
    ) -> Call:
        """The call of a function with these keyword arguments of the configuration's.

        `columns` are those that the rows of the data have besides; `has_truth` says whether any row
        has a ground truth.
        """
        if not callable(function):
            raise ConfigError(
                f"the reward is {function!r:.60}, a {type(function).__name__}: name a function."
            )
        try:
            parameters = inspect.signature(function).parameters
        except (TypeError, ValueError):  # written in C: it says nothing of itself
            return cls(function, {name: name for name in SAMPLE_FIELDS}, kwargs)

        takes_batches = any(mark in parameters for mark in BATCH_MARKS)
        fills = _what_fills(takes_batches, columns)
        if not has_truth:
            fills = {name: entry for name, entry in fills.items() if entry != TRUTH}
        for parameter in parameters.values():
            _check_filled(parameter, {*fills, *kwargs}, columns, has_truth)

        fields = {name: fills[name] for name in parameters if name in fills}
        takes_rest = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
        if takes_rest and takes_batches:
            fields = {name: fills[name] for name in fills if name not in SHORT_PLURALS} | fields
        return cls(function, fields, kwargs, takes_batches, takes_rest)

    @property
    def reads(self) -> list[str] | None:
        """The entries of a sample that it may get; None: all of them."""
        return None if self.takes_rest else list(self.fields.values())

    @property
    def runs_side_by_side(self) -> bool:
        """Whether calls wait without computing, so that many go at the same time."""
        return inspect.iscoroutinefunction(self.function)

    def __call__(self, sample: Sample) -> Any:
        """What the function says of a sample; a coroutine of one of its kind."""
        read = dict(sample) if self.takes_rest else {}
        for name, entry in self.fields.items():
            if entry in sample:
                read[name] = sample[entry]
        return self.function(**(read | self.kwargs))

    def whole_batch(self, samples: Sequence[Sample]) -> Any:
        """What the function says of all samples at once."""
        read = {}
        for name, entry in self.fields.items():
            read[name] = [sample.get(entry) for sample in samples]
        return self.function(**(read | self.kwargs))


def _what_fills(takes_batches: bool, columns: Sequence[str]) -> dict[str, str]:
    """Parameter -> the entry of a sample that fills it."""
    fills = {column: column for column in columns}
    for name, entry in [*((name, name) for name in SAMPLE_FIELDS), *SHORT_NAMES.items()]:
        fills[f"{name}s" if takes_batches else name] = entry
    return fills


def _check_filled(
    parameter: inspect.Parameter, known: Collection[str], columns: Sequence[str], has_truth: bool
) -> None:
    if parameter.kind is parameter.POSITIONAL_ONLY:
        raise ConfigError(
            f"the reward function's parameter {parameter.name!r} takes no keyword, and functions "
            "are called by keyword: drop the / from its signature."
        )

    takes_many = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    has_default = parameter.default is not parameter.empty
    if not (takes_many or has_default or parameter.name in known):
        if not has_truth and parameter.name in (TRUTH, f"{TRUTH}s"):
            theirs = f" (the rows' columns: {', '.join(columns)})" if columns else ""
            raise ConfigError(
                f"the reward function asks for {parameter.name}, and no row has a ground truth: "
                "neither reward_model.ground_truth nor a column ground_truth. Ask for what there "
                f"is{theirs}, or give the parameter a default."
            )
        theirs = f", the rows' columns {', '.join(columns)}" if columns else ""
        raise ConfigError(
            f"nothing fills the reward function's parameter {parameter.name!r}. Functions are "
            f"called by keyword with {', '.join([*SHORT_NAMES, *SAMPLE_FIELDS])} (or, for a whole "
            f"batch, responses and the other plurals){theirs}, and what its kwargs have: rename "
            "it, or give it a default."
        )
