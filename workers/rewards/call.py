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
from workers.chats import text_of
from workers.rewards.outcome import Sample

IMAGES = "images"
SAMPLE_FIELDS = {
    "data_source": "the data set that the prompt is from",
    "solution_str": "the response as text",
    "ground_truth": "the row's reward_model.ground_truth",
    "extra_info": "the row's extra_info",
    "raw_prompt": "the prompt as the row has it: text, or a conversation",
    "uid": "ROW-EPOCH of the prompt",
    "num_tokens": "tokens of the response",
    IMAGES: "the images of the sample, as a list of PIL images",
}
"""By parameter of a reward function: its value. Plural names get lists over the whole batch."""
SPLIT_FIELDS = {
    "content": "the response without its reasoning",
    "reasoning_content": "the reasoning of the response, or an empty text",
}
"""By parameter: its value, unless the rows have a column of this name."""
TRUTH = "ground_truth"
SHORT_NAMES = {"prompt": "raw_prompt", "response": "solution_str"}
"""By alternative name of a parameter: the field that it gets."""
SHORT_PLURALS = [f"{name}s" for name in SHORT_NAMES]
COMPLETIONS = "completions"
"""The parameter that marks a reward function written for TRL.

The completions of chats are lists of messages.
"""
BATCH_MARKS = {"solution_strs", "responses"}
"""A function with one of these parameters scores a whole batch in one call."""

# The calling conventions. By parameter: the entry of a sample that it gets, as one value or, if
# the function scores a whole batch, as a list. Columns have their own names in all of them.
FIELDS_WITHOUT_SIGNATURE = {name: name for name in SAMPLE_FIELDS}
FIELDS_OF_SAMPLE = FIELDS_WITHOUT_SIGNATURE | SHORT_NAMES
FIELDS_OF_BATCH = {f"{name.removesuffix('s')}s": entry for name, entry in FIELDS_OF_SAMPLE.items()}
TRL_FIELDS = {**FIELDS_WITHOUT_SIGNATURE, "prompts": "raw_prompt", COMPLETIONS: COMPLETIONS}


def prompt_text(sample: Sample) -> str:
    """Return the prompt as text; of a conversation, the contents of all messages."""
    prompt = sample.get("raw_prompt", "")
    if isinstance(prompt, str):
        return prompt
    return "\n".join(text_of(message["content"]) for message in prompt)


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
        called = f"the reward function {getattr(function, '__name__', function)}"
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):  # a function in C without a signature
            return cls(function, FIELDS_WITHOUT_SIGNATURE, kwargs)

        parameters = signature.parameters
        if COMPLETIONS in parameters and COMPLETIONS not in columns:
            convention = TRL_FIELDS
        elif not BATCH_MARKS.isdisjoint(parameters):
            convention = FIELDS_OF_BATCH
        else:
            convention = FIELDS_OF_SAMPLE
        takes_batches = convention is not FIELDS_OF_SAMPLE
        returned = inspect.formatannotation(signature.return_annotation).strip("'\"")
        if not takes_batches and returned.removeprefix("typing.").lower().startswith("list"):
            raise ConfigError(
                f"{called} returns a {returned}, but it is called on one sample. "
                "Return a number, or score a batch with the parameter responses or solution_strs."
            )
        plural = "s" if convention is FIELDS_OF_BATCH else ""
        split = {f"{name}{plural}": name for name in SPLIT_FIELDS}
        fills = split | {column: column for column in columns} | convention
        if not has_truth:
            fills = {name: entry for name, entry in fills.items() if entry != TRUTH}
        for parameter in parameters.values():
            _check_filled(called, parameter, {*fills, *kwargs}, columns, has_truth)

        takes_rest = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        names = {*parameters}
        if takes_rest and takes_batches:  # `**kwargs` gets an entry once, by its long name
            duplicates = SHORT_PLURALS if convention is FIELDS_OF_BATCH else ()
            names |= fills.keys() - duplicates - (split.keys() - {*columns})
        fields = {name: fills[name] for name in fills if name in names}
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
        read = {name: _value(sample, name) for name in sample} if self.takes_rest else {}
        fields = self.fields.items()
        read |= {name: _value(sample, entry) for name, entry in fields if entry in sample}
        return self.function(**(read | self.kwargs))

    def whole_batch(self, samples: Sequence[Sample]) -> Any:
        """Call the function on all samples at once."""
        read = {name: [_value(s, entry) for s in samples] for name, entry in self.fields.items()}
        return self.function(**(read | self.kwargs))


def _value(sample: Sample, entry: str) -> Any:
    """Return an entry of a sample; a completion is text, or messages if the prompt is a chat."""
    if entry == IMAGES:
        from workers.images import ImageRef, open_image

        return [open_image(ImageRef(*ref)) for ref in sample.get(IMAGES, ())]
    if entry != COMPLETIONS or COMPLETIONS in sample:
        return sample.get(entry)
    text = sample["solution_str"]
    is_chat = isinstance(sample.get("raw_prompt"), list)
    return [{"role": "assistant", "content": text}] if is_chat else text


def _check_filled(
    called: str,
    parameter: inspect.Parameter,
    known: Collection[str],
    columns: Sequence[str],
    has_truth: bool,
) -> None:
    """Raise if no field of a sample, column of a row or keyword fills this parameter."""
    if parameter.kind is parameter.POSITIONAL_ONLY:
        raise ConfigError(
            f"{called} has the positional-only parameter {parameter.name!r}, but reward "
            "functions are called with keyword arguments. Drop the / from its signature, or pass "
            "a function that calls it."
        )

    takes_many = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    if takes_many or parameter.default is not parameter.empty or parameter.name in known:
        return
    if not has_truth and parameter.name in (TRUTH, f"{TRUTH}s"):
        theirs = f" (the rows' columns: {', '.join(columns)})" if columns else ""
        raise ConfigError(
            f"{called} has the parameter {parameter.name}, but no row has a ground "
            "truth: neither reward_model.ground_truth nor a column ground_truth. Use a column "
            f"that exists{theirs}, or give the parameter a default."
        )
    theirs = f", the rows' columns {', '.join(columns)}" if columns else ""
    fields = [name for name in (*SHORT_NAMES, *SAMPLE_FIELDS) if has_truth or name != TRUTH]
    raise ConfigError(
        f"{called} has an unknown parameter {parameter.name!r}."
        f"{nearest(parameter.name, [*fields, *columns])} Available: "
        f"{', '.join(fields)}{theirs}, and the names in reward.function.kwargs (`kwargs` in "
        "reward.list). A function of a whole batch has plural names, such as responses. Rename "
        "the parameter, or give it a default."
    )
