"""The first prompt as the model reads it, and notes on prompts that may not be what you mean.

    lines = first_prompt_lines(prompts, tokenizer, 512, stop_ids)    # for `verl-like check`

Prompts of environments are shown as their rows have them, without the first observation.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from trainer.data.prompt_tokens import render_messages
from trainer.data.prompts import PromptSet

MAX_CHARACTERS, MAX_LINES = 1200, 12
"""Maximum length of the printed prompt; a longer one lacks its middle."""
ANSWER = "qxjanswer"
"""A text that is looked for in a rendered chat."""
REPEATED = re.compile(r"(<[^<>\s]+>)\1{3,}")
"""A special token that occurs several times in a row, such as that of an image."""
MIN_SHARE_OF_REPEATS = 0.1
"""Fraction of repeated prompts from which a note counts them."""


def first_prompt_lines(
    prompts: PromptSet, tokenizer: Any, width: int, stop_ids: Sequence[int]
) -> list[str]:
    """Return the first prompt with a slot for the response of at most `width` tokens, and notes."""
    batch = prompts.batch(prompts.rows[:1].tolist(), epoch=0)
    (prompt,) = batch.non_tensor_batch["raw_prompt"]
    ids = prompts.tokens_of_first()
    text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    text = REPEATED.sub(lambda found: f"{found[1]} (x {len(found[0]) // len(found[1])})", text)
    characters = "".join(_without_middle(text, MAX_CHARACTERS, "characters"))
    stops = " or ".join(tokenizer.convert_ids_to_tokens([*dict.fromkeys(stop_ids)]))
    slot = f"[response: at most {width:,} tokens{f', ends with {stops}' if stops else ''}]"
    shown = _without_middle(f"{characters}{slot}".split("\n"), MAX_LINES, "lines")
    return [
        f"First prompt, as the model reads it ({len(ids):,} tokens):",
        *(f"  {line}" for line in shown),
        *(f"note: {note}" for note in prompt_notes(prompt, ids, tokenizer, stop_ids)),
    ]


def _without_middle(parts: Sequence[str], most: int, unit: str) -> Sequence[str]:
    """Return lines or characters, of which at most the first and last ones are shown."""
    if len(parts) <= most:
        return parts
    half = most // 2
    return [*parts[:half], f"[... {len(parts) - 2 * half:,} {unit} ...]", *parts[-half:]]


def prompt_notes(
    prompt: Any, ids: np.ndarray[Any, Any], tokenizer: Any, stop_ids: Collection[int]
) -> list[str]:
    """Return notes on a prompt and its tokens: what a model may read otherwise than you expect."""
    notes = []
    bos = tokenizer.bos_token_id
    if bos is not None and len(ids) > 1 and ids[0] == ids[1] == bos:
        notes.append(
            f"the prompt begins with {tokenizer.bos_token!r} twice: the text already has it, or "
            "the chat template writes it twice. Remove one."
        )
    if isinstance(prompt, str):
        marks = _marks_in(ids, tokenizer)
        if tokenizer.chat_template and not marks:
            notes.append(
                "the prompts are plain strings, which do not go through the model's chat template. "
                "If the model is to answer as in a chat, write each as messages, "
                '[{"role": "user", "content": ...}].'
            )
        elif marks and marks[-1] in stop_ids:
            end = tokenizer.convert_ids_to_tokens([marks[-1]])[0]
            notes.append(
                f"the prompt ends after {end}, without the beginning of the assistant's turn. "
                "Write it, or write the prompts as messages."
            )
        return notes
    beginning = missing_generation_prompt(prompt, tokenizer)
    if beginning:
        notes.append(
            "the chat template ignores add_generation_prompt: the prompt lacks "
            f"{beginning!r}, with which the template begins an answer. The model has to write it "
            "itself. Use the template that the model was published with, or add "
            "{% if add_generation_prompt %} to its end."
        )
    return notes


def _marks_in(ids: np.ndarray[Any, Any], tokenizer: Any) -> list[int]:
    """Return the special tokens of a plain string that the tokenizer did not add itself."""
    added = {*tokenizer("a")["input_ids"]}
    special = {token for token, entry in tokenizer.added_tokens_decoder.items() if entry.special}
    return [token for token in ids.tolist() if token in special - added]


def missing_generation_prompt(messages: Any, tokenizer: Any) -> str:
    """Return what a template writes between the prompt and an answer, if the prompt lacks it.

    Templates whose answer directly follows the last message, such as Mistral's, lack nothing.
    """
    if messages[-1]["role"] == "assistant":
        return ""
    answer = {"role": "assistant", "content": ANSWER}
    try:
        prompt = render_messages(messages, tokenizer, add_generation_prompt=True)
        without = render_messages(messages, tokenizer)
        answered = render_messages([*messages, answer], tokenizer)
    except ValueError:  # the template rejects such a chat
        return ""
    if prompt != without or not answered.startswith(prompt):
        return ""
    between = answered.removeprefix(prompt).partition(ANSWER)[0]
    return between if between.strip() else ""


def repeat_notes(prompts: PromptSet) -> list[str]:
    """Return a note if all prompts, or a large share of them, are equal to others."""
    count, repeated = len(prompts), prompts.num_repeated
    if count > 1 and repeated == count - 1:
        return [
            f"note: all {count:,} prompts of data.train_files are equal, so every group samples "
            "the same one. Check the column that data.prompt_key names."
        ]
    if repeated < MIN_SHARE_OF_REPEATS * count:
        return []
    return [
        f"note: {repeated:,} of {count:,} prompts of data.train_files ({repeated / count:.0%}) "
        "repeat an earlier one, and count several times in an epoch. Remove the copies unless you "
        "mean them."
    ]
