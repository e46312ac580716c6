"""Call a reward function by keyword, with the fields of a sample that its parameters name.

    call = RewardCall.of(function, kwargs, columns)   # rejects a parameter without a value
    call(sample)                                # scores one sample
    call.whole_batch(samples)                   # if the function has plural parameters

This module does not import torch, because it runs in reward processes, which start often.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from verl_like.errors import ConfigError, nearest

Sample = dict[str, Any]
"""The values of a sample that a reward function can read: `SAMPLE_FIELDS` and other columns."""
SAMPLE_FIELDS = {
    "data_source": "the data set that the prompt is from",
    "solution_str": "the response as text",
    "ground_truth": "the row's reward_model.ground_truth",
    "extra_info": "the row's extra_info",
    "raw_prompt": "the prompt as the row has it: text, or a conversation",
    "uid": "ROW-EPOCH of the prompt",
    "num_tokens": "tokens of the response",
}
"""By parameter of a reward function: its value. Plural names get lists over the whole batch."""
TRUTH = "ground_truth"
SHORT_NAMES = {"prompt": "raw_prompt", "response": "solution_str"}
"""By alternative name of a parameter: the field that it gets."""
SHORT_PLURALS = [f"{name}s" for name in SHORT_NAMES]
BATCH_MARKS = ("solution_strs", "responses")
"""A function with one of these parameters scores a whole batch in one call."""
COMPLETIONS = "completions"
"""The parameter that marks a reward function written for TRL.

It scores a whole batch. Its parameters for columns have singular names, and completions of chats
are lists of messages.
"""


@dataclass(frozen=True)
class RewardCall:
    """A reward function, and which arguments its calls get."""

    function: Callable[..., Any]
    fields: dict[str, str]
    """By parameter: the entry of a sample that it gets."""
    kwargs: dict[str, Any]
    takes_batches: bool = False
    """True if one call scores a whole batch and returns a list."""
    takes_rest: bool = False
    """True if the function has `**kwargs`, and so gets all other entries of a sample."""

    @classmethod
    def of(
        cls,
        function: Callable[..., Any],
        kwargs: dict[str, Any],
        columns: Sequence[str] = (),
        has_truth: bool = True,
    ) -> RewardCall:
        """Match a function's parameters with the fields of a sample and the configured `kwargs`.

        `columns` are the data's other columns. `has_truth` is True if any row has a ground truth.
        """
        if not callable(function):
            raise ConfigError(
                f"the reward is {function!r:.60}, an object of type {type(function).__name__}, "
                "which cannot be called. Set reward.function.name (`function` in reward.list, "
                "--function=FILE.py:NAME for `verl-like serve-reward`) to a function's name."
            )
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):  # a function in C without a signature
            return cls(function, {name: name for name in SAMPLE_FIELDS}, kwargs)

        parameters = signature.parameters
        of_trl = COMPLETIONS in parameters and COMPLETIONS not in columns
        takes_batches = of_trl or any(mark in parameters for mark in BATCH_MARKS)
        returned = inspect.formatannotation(signature.return_annotation).strip("'\"")
        is_list = returned.removeprefix("typing.").lower().startswith("list")
        if is_list and not takes_batches:
            raise ConfigError(
                f"the reward function returns a {returned}, but it is called on one sample. "
                "Return a number, or score a batch with the parameter responses or solution_strs."
            )
        plural = "s" if takes_batches and not of_trl else ""
        # by parameter: the entry of a sample that it gets
        fills = {column: column for column in columns}
        fills |= {f"{name}{plural}": name for name in SAMPLE_FIELDS}
        if of_trl:
            fills |= {"prompts": "raw_prompt", COMPLETIONS: COMPLETIONS}
        else:
            fills |= {f"{name}{plural}": entry for name, entry in SHORT_NAMES.items()}
        if not has_truth:
            fills = {name: entry for name, entry in fills.items() if entry != TRUTH}
        for parameter in parameters.values():
            _check_filled(parameter, {*fills, *kwargs}, columns, has_truth)

        fields = {name: fills[name] for name in parameters if name in fills}
        takes_rest = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        if takes_rest and takes_batches:
            duplicates = () if of_trl else SHORT_PLURALS
            fields = {name: fills[name] for name in fills if name not in duplicates} | fields
        return cls(function, fields, kwargs, takes_batches, takes_rest)

    @property
    def reads(self) -> list[str] | None:
        """Names of the entries of a sample that the function gets; None means all."""
        if self.takes_rest:
            return None
        entries = {*self.fields.values()}
        return sorted(
            entries | ({"raw_prompt", "solution_str"} if COMPLETIONS in entries else set())
        )

    @property
    def is_async(self) -> bool:
        """True if the function is a coroutine function, so that calls can run concurrently."""
        return inspect.iscoroutinefunction(self.function)

    def __call__(self, sample: Sample) -> Any:
        """Call the function on a sample; a coroutine function returns a coroutine."""
        read = dict(sample) if self.takes_rest else {}
        for name, entry in self.fields.items():
            if entry in sample:
                read[name] = sample[entry]
        return self.function(**(read | self.kwargs))

    def whole_batch(self, samples: Sequence[Sample]) -> Any:
        """Call the function on all samples at once."""
        read = {}
        for name, entry in self.fields.items():
            read[name] = [_value(sample, entry) for sample in samples]
        return self.function(**(read | self.kwargs))


def _value(sample: Sample, entry: str) -> Any:
    """Return an entry of a sample; a completion is text, or messages if the prompt is a chat."""
    if entry != COMPLETIONS or COMPLETIONS in sample:
        return sample.get(entry)
    text = sample["solution_str"]
    is_chat = isinstance(sample.get("raw_prompt"), list)
    return [{"role": "assistant", "content": text}] if is_chat else text


def _check_filled(
    parameter: inspect.Parameter, known: Collection[str], columns: Sequence[str], has_truth: bool
) -> None:
    if parameter.kind is parameter.POSITIONAL_ONLY:
        raise ConfigError(
            f"the reward function's parameter {parameter.name!r} is positional-only, but "
            "functions are called with keyword arguments. Drop the / from its signature."
        )

    takes_many = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    has_default = parameter.default is not parameter.empty
    if not (takes_many or has_default or parameter.name in known):
        if not has_truth and parameter.name in (TRUTH, f"{TRUTH}s"):
            theirs = f" (the rows' columns: {', '.join(columns)})" if columns else ""
            raise ConfigError(
                f"the reward function has the parameter {parameter.name}, but no row has a ground "
                "truth: neither reward_model.ground_truth nor a column ground_truth. Use a column "
                f"that exists{theirs}, or give the parameter a default."
            )
        theirs = f", the rows' columns {', '.join(columns)}" if columns else ""
        fields = [name for name in (*SHORT_NAMES, *SAMPLE_FIELDS) if has_truth or name != TRUTH]
        raise ConfigError(
            f"the reward function has an unknown parameter {parameter.name!r}."
            f"{nearest(parameter.name, [*fields, *columns])} Available: "
            f"{', '.join(fields)}{theirs}, and the names in reward.function.kwargs (`kwargs` in "
            "reward.list). "
            "A function of a whole batch has plural names, such as responses. Rename the "
            "parameter, or give it a default."
        )
