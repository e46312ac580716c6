"""Reasoning is told apart from the answer, in the formats of published models."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.workers.agents.templates import AFTER_CALLS, SHAPES, Shape, tokenizer_of
from verl_like.batch.protocol import DataProto
from workers.rewards.call import RewardCall
from workers.rewards.manager import reward_samples
from workers.thoughts import ThoughtReader, split_thoughts

HARMONY = "<|channel|>analysis<|message|>two plus two is four<|end|><|start|>assistant"


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>\nhm\n</think>\n\nfour", "hm", "four"),
        ("[THINK]hm[/THINK]four", "hm", "four"),
        ("<|START_THINKING|>hm<|END_THINKING|>four", "hm", "four"),
        ("<|channel>thought\nhm<channel|>four", "hm", "four"),
        (f"{HARMONY}<|channel|>final<|message|>4", "two plus two is four", "4"),
        (f"{HARMONY}<|channel|>final<|message|>4<|return|>", "two plus two is four", "4"),
        (
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary"
            "<|message|>I look.<|end|><|start|>assistant<|channel|>analysis<|message|>b<|end|>"
            "<|start|>assistant<|channel|>final<|message|>4",
            "a\n\nb",
            "I look.\n\n4",
        ),
        ("<|channel|>analysis<|message|>two plus", "two plus", ""),
        ("<|channel|>anal", "", ""),
        ("<think>cut off", "cut off", ""),
        ("<think></think>\n\nfour", "", "four"),
        ("hm</think>four", "hm", "four"),  # the prompt has opened it
        ("<think>a</think><think>b</think>four", "a\n\nb", "four"),
        ("four", "", "four"),
        (" four <think> ", "", " four <think> "),
        ("", "", ""),
    ],
)
def test_a_response_is_split(text: str, reasoning: str, content: str) -> None:
    assert split_thoughts(text) == (reasoning, content)


def test_a_response_that_is_cut_in_reasoning_of_the_prompt_has_no_content() -> None:
    assert split_thoughts("hm", is_open=True) == ("hm", "")
    assert split_thoughts("hm</think>four", is_open=True) == ("hm", "four")
    assert split_thoughts("hm") == ("", "hm")


def ids_of(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def test_a_prompt_that_opens_reasoning_is_recognized() -> None:
    tokenizer = tokenizer_of(SHAPES["qwen3"])
    assert not ThoughtReader.of(tokenizer).is_open
    tokenizer.chat_template += "{% if add_generation_prompt %}<think>\n{% endif %}"
    assert ThoughtReader.of(tokenizer).is_open


@pytest.mark.parametrize("shape", [SHAPES["gptoss"], AFTER_CALLS["gptoss"]])
def test_ids_of_channels_are_not_joined(shape: Shape) -> None:
    tokenizer = tokenizer_of(shape)
    reader = ThoughtReader.of(tokenizer)
    assert reader.hides
    ids = ids_of(tokenizer, f"{HARMONY}<|channel|>final<|message|>4<eos>")
    assert tokenizer.decode(ids, skip_special_tokens=True) == (
        "analysistwo plus two is fourassistantfinal4"
    )
    assert split_thoughts(reader.text_of(ids)) == ("two plus two is four", "4")


def batch_of(tokenizer: Any, text: str) -> DataProto:
    from verl_like.batch.columns import object_rows

    ids = torch.tensor([ids_of(tokenizer, text)])
    return DataProto.from_dict(
        {"responses": ids, "response_mask": torch.ones_like(ids)},
        {
            "data_source": object_rows(["sums"]),
            "reward_model": object_rows([{"ground_truth": "4"}]),
            "extra_info": object_rows([{}]),
        },
    )


def answer_and_reasoning(response: str, content: str, reasoning_content: str) -> Any:
    """Return what a reward function gets."""
    return response, content, reasoning_content


def test_a_reward_function_gets_content_and_reasoning() -> None:
    call = RewardCall.of(answer_and_reasoning, {})
    tokenizer = tokenizer_of(SHAPES["gptoss"])
    text = f"{HARMONY}<|channel|>final<|message|>4<|return|>"
    (sample,) = reward_samples(batch_of(tokenizer, text), tokenizer)
    assert call(sample) == ("4", "4", "two plus two is four")

    tokenizer = tokenizer_of(SHAPES["qwen3"])
    thought = "<think>\nhm\n</think>\n\nfour"
    (sample,) = reward_samples(batch_of(tokenizer, f"{thought}<|im_end|>"), tokenizer)
    assert call(sample) == (thought, "four", "hm")


def test_a_column_of_the_rows_keeps_the_name_content() -> None:
    from verl_like.batch.columns import object_rows

    tokenizer = tokenizer_of(SHAPES["qwen3"])
    batch = batch_of(tokenizer, "<think>a</think>four")
    batch.non_tensor_batch["row_columns"] = object_rows([{"content": "of the row"}])
    (sample,) = reward_samples(batch, tokenizer)
    call = RewardCall.of(answer_and_reasoning, {}, columns=["content"])
    assert call(sample)[1:] == ("of the row", "a")


def contents_of(responses: list[str], contents: list[str]) -> list[float]:
    """Score a batch."""
    return [float(content == "four") for content in contents]


def test_a_function_of_a_batch_gets_lists() -> None:
    tokenizer = tokenizer_of(SHAPES["qwen3"])
    samples = reward_samples(batch_of(tokenizer, "<think>a</think>four"), tokenizer)
    assert RewardCall.of(contents_of, {}).whole_batch(samples) == [1.0]
