"""What a reward server is sent, and what its answer means: one class for each protocol."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Protocol

from workers.config import RewardConfig
from workers.rewards.call import Sample
from workers.rewards.outcome import Outcome, read_outcome

NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
JUDGE_TEMPLATE = """Rate the answer from 0 (wrong) to 10 (perfect). Reply with the number alone.

Question: {prompt}

Answer: {solution_str}"""


class RemoteProtocol(Protocol):
    """How one kind of server is spoken to."""

    largest_batch: int | None
    """Samples of one request; None leaves it to the configuration."""

    def request(self, samples: Sequence[Sample], config: RewardConfig) -> Any:
        """What is posted, as JSON has it."""

    def outcomes(self, answer: Any, count: int) -> list[Outcome]:
        """The outcome of every sample; a KeyError, TypeError or ValueError if it says none."""


class OwnProtocol:
    """`{"samples": [row, ...]}` -> `{"outcomes": [{"score": 1.0, ...} | {"error": "..."}]}`."""

    largest_batch = None

    def request(self, samples: Sequence[Sample], config: RewardConfig) -> Any:
        """The rows as a function in process would get them."""
        return {"samples": list(samples)}

    def outcomes(self, answer: Any, count: int) -> list[Outcome]:
        """Scores with the function's other numbers, or its errors."""
        found = _exactly(answer["outcomes"], count)
        return [
            (None, {}, str(row["error"])) if "error" in row else read_outcome(row) for row in found
        ]


class OpenRLHFProtocol:
    """`{"query", "prompts", "labels"}` -> `{"rewards": [...]}`, with `extra_logs` if there are."""

    largest_batch = None

    def request(self, samples: Sequence[Sample], config: RewardConfig) -> Any:
        """The query is the prompt with its response."""
        prompts = [prompt_text(sample) for sample in samples]
        return {
            "query": [
                prompt + str(sample["solution_str"])
                for prompt, sample in zip(prompts, samples, strict=True)
            ],
            "prompts": prompts,
            "labels": [sample["ground_truth"] for sample in samples],
        }

    def outcomes(self, answer: Any, count: int) -> list[Outcome]:
        """One number a sample; `extra_logs` are lists of as many."""
        scores = _exactly(answer["rewards"], count)
        extras = {
            name: _exactly(values, count) for name, values in answer.get("extra_logs", {}).items()
        }
        rows = range(count)
        return [
            read_outcome({"score": scores[row], **{name: extras[name][row] for name in extras}})
            for row in rows
        ]


class JudgeProtocol:
    """A chat completion for each sample; its first number is the score."""

    largest_batch = 1

    def request(self, samples: Sequence[Sample], config: RewardConfig) -> Any:
        """The filled template as the user's message, greedily answered."""
        asked = "Reply with 0."  # at the start, to see that the server answers
        for sample in samples:
            fields = {**sample, "prompt": prompt_text(sample)}
            asked = (config.template or JUDGE_TEMPLATE).format_map(fields)
        message = {"role": "user", "content": asked}
        return {"model": config.model, "messages": [message], "temperature": 0}

    def outcomes(self, answer: Any, count: int) -> list[Outcome]:
        """The number in the reply."""
        reply = str(answer["choices"][0]["message"]["content"])
        if not count:
            return []
        number = NUMBER.search(reply)
        if number is None:
            return [(None, {}, f"the judge's reply has no number: {reply!r:.80}")]
        return [(float(number.group()), {}, None)]


PROTOCOLS: dict[str, RemoteProtocol] = {
    "samples": OwnProtocol(),
    "openrlhf": OpenRLHFProtocol(),
    "openai": JudgeProtocol(),
}


def prompt_text(sample: Sample) -> str:
    """The prompt as text: of a conversation, what each turn says."""
    prompt = sample.get("raw_prompt", "")
    if isinstance(prompt, str):
        return prompt
    return "\n".join(str(message["content"]) for message in prompt)


def as_json(content: Any) -> bytes:
    """For the wire; numbers of numpy become Python's."""
    return json.dumps(content, default=_plain, ensure_ascii=True).encode()


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{value!r:.80} in a sample cannot be sent as JSON")


def _exactly(found: Any, count: int) -> list[Any]:
    if not isinstance(found, list) or len(found) != count:
        size = len(found) if isinstance(found, list) else type(found).__name__
        raise ValueError(f"{count} samples were sent, {size} outcomes came back")
    return found
