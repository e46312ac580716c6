"""Build requests to reward servers and read their replies, for every protocol."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from workers.config import RewardConfig
from workers.rewards.call import Sample, prompt_text
from workers.rewards.outcome import Outcome, read_outcome

NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
JUDGE_TEMPLATE = """Rate the answer from 0 (wrong) to 10 (perfect). Reply with the number alone.

Question: {prompt}

Answer: {solution_str}"""


@dataclass(frozen=True)
class RemoteProtocol:
    """Builds requests for one kind of server, and reads its replies."""

    request: Callable[[Sequence[Sample], RewardConfig], Any]
    """Returns the request, as a JSON-compatible object."""
    outcomes: Callable[[Any, int], list[Outcome]]
    """Reads a reply for so many samples; raises KeyError, TypeError or ValueError if it is invalid.
    """
    largest_batch: int | None = None
    """Maximum samples per request; None: `batch_size` of the reward."""


def _samples_request(samples: Sequence[Sample], config: RewardConfig) -> Any:
    """Return the samples with all fields that a local function could read."""
    return {"samples": list(samples)}


def _samples_outcomes(answer: Any, count: int) -> list[Outcome]:
    """Read each sample's score and other numbers, or its error."""
    rows = _check_count(answer["outcomes"], count)
    return [(None, {}, str(row["error"])) if "error" in row else read_outcome(row) for row in rows]


def _openrlhf_request(samples: Sequence[Sample], config: RewardConfig) -> Any:
    """Return queries (prompts with their responses), prompts and labels."""
    prompts = [prompt_text(sample) for sample in samples]
    return {
        "query": [
            prompt + str(sample["solution_str"])
            for prompt, sample in zip(prompts, samples, strict=True)
        ],
        "prompts": prompts,
        "labels": [sample["ground_truth"] for sample in samples],
    }


def _openrlhf_outcomes(answer: Any, count: int) -> list[Outcome]:
    """Read one number per sample, and lists of the same length in `extra_logs`."""
    scores = _check_count(answer["rewards"], count)
    extras = {
        name: _check_count(values, count) for name, values in answer.get("extra_logs", {}).items()
    }
    return [
        read_outcome({"score": scores[row], **{name: extras[name][row] for name in extras}})
        for row in range(count)
    ]


def _judge_request(samples: Sequence[Sample], config: RewardConfig) -> Any:
    """Return the filled template as a user message, with greedy decoding."""
    prompt = "Reply with 0."  # without samples, a test of the server (`RemoteScorer.start`)
    for sample in samples:
        fields = {**sample, "prompt": prompt_text(sample)}
        prompt = (config.template or JUDGE_TEMPLATE).format_map(fields)
    message = {"role": "user", "content": prompt}
    return {"model": config.model, "messages": [message], "temperature": 0}


def _judge_outcomes(answer: Any, count: int) -> list[Outcome]:
    """Read the first number in the completion as the score."""
    reply = str(answer["choices"][0]["message"]["content"])
    if not count:
        return []
    number = NUMBER.search(reply)
    if number is None:
        return [(None, {}, f"the judge's reply has no number: {reply!r:.80}")]
    return [(float(number.group()), {}, None)]


PROTOCOLS = {
    # {"samples": [row, ...]} -> {"outcomes": [{"score": 1.0} or {"error": "..."}]}
    "samples": RemoteProtocol(_samples_request, _samples_outcomes),
    # {"query", "prompts", "labels"} -> {"rewards": [...]}, and optionally "extra_logs"
    "openrlhf": RemoteProtocol(_openrlhf_request, _openrlhf_outcomes),
    # one chat completion per sample
    "openai": RemoteProtocol(_judge_request, _judge_outcomes, largest_batch=1),
}


def as_json(content: Any) -> bytes:
    """Serialize to JSON; numbers and arrays of numpy become numbers and lists."""
    return json.dumps(content, default=_plain, ensure_ascii=True).encode()


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{value!r:.80} in a sample cannot be sent as JSON")


def _check_count(outcomes: Any, count: int) -> list[Any]:
    if not isinstance(outcomes, list) or len(outcomes) != count:
        size = f" of {len(outcomes)}" if isinstance(outcomes, list) else ""
        raise ValueError(
            f"expected a list of {count} outcomes, one per sample, got a "
            f"{type(outcomes).__name__}{size}"
        )
    return outcomes
