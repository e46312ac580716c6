"""Build requests to reward servers and read their replies, with one class per protocol."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

from workers.config import RewardConfig
from workers.rewards.call import Sample
from workers.rewards.outcome import Outcome, read_outcome

NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
JUDGE_TEMPLATE = """Rate the answer from 0 (wrong) to 10 (perfect). Reply with the number alone.

Question: {prompt}

Answer: {solution_str}"""


class RemoteProtocol(Protocol):
    """Builds requests for one kind of server, and reads its replies."""

    largest_batch: ClassVar[int | None]
    """Maximum samples per request; None: `batch_size` of the reward."""

    def request(self, samples: Sequence[Sample], config: RewardConfig) -> Any:
        """Return the request, as a JSON-compatible object."""

    def outcomes(self, answer: Any, count: int) -> list[Outcome]:
        """Read a reply; raise KeyError, TypeError or ValueError if it is invalid."""


class VerlLikeProtocol:
    """`{"samples": [row, ...]}`; replies `{"outcomes": [{"score": 1.0} or {"error": "..."}]}`."""

    largest_batch: ClassVar[int | None] = None

    def request(self, samples: Sequence[Sample], config: RewardConfig) -> Any:
        """Return the samples with all fields that a local function could read."""
        return {"samples": list(samples)}

    def outcomes(self, answer: Any, count: int) -> list[Outcome]:
        """Read each sample's score and other numbers, or its error."""
        rows = _check_count(answer["outcomes"], count)
        return [
            (None, {}, str(row["error"])) if "error" in row else read_outcome(row) for row in rows
        ]


class OpenRLHFProtocol:
    """`{"query", "prompts", "labels"}` -> `{"rewards": [...]}`, and optionally `extra_logs`."""

    largest_batch: ClassVar[int | None] = None

    def request(self, samples: Sequence[Sample], config: RewardConfig) -> Any:
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

    def outcomes(self, answer: Any, count: int) -> list[Outcome]:
        """Read one number per sample, and lists of the same length in `extra_logs`."""
        scores = _check_count(answer["rewards"], count)
        extras = {
            name: _check_count(values, count)
            for name, values in answer.get("extra_logs", {}).items()
        }
        rows = range(count)
        return [
            read_outcome({"score": scores[row], **{name: extras[name][row] for name in extras}})
            for row in rows
        ]


class JudgeProtocol:
    """One chat completion per sample; the first number in the completion is the score."""

    largest_batch: ClassVar[int | None] = 1

    def request(self, samples: Sequence[Sample], config: RewardConfig) -> Any:
        """Return the filled template as a user message, with greedy decoding."""
        prompt = "Reply with 0."  # without samples, a test of the server (`RemoteScorer.start`)
        for sample in samples:
            fields = {**sample, "prompt": prompt_text(sample)}
            prompt = (config.template or JUDGE_TEMPLATE).format_map(fields)
        message = {"role": "user", "content": prompt}
        return {"model": config.model, "messages": [message], "temperature": 0}

    def outcomes(self, answer: Any, count: int) -> list[Outcome]:
        """Read the first number in the completion."""
        reply = str(answer["choices"][0]["message"]["content"])
        if not count:
            return []
        number = NUMBER.search(reply)
        if number is None:
            return [(None, {}, f"the judge's reply has no number: {reply!r:.80}")]
        return [(float(number.group()), {}, None)]


PROTOCOLS: dict[str, RemoteProtocol] = {
    "samples": VerlLikeProtocol(),
    "openrlhf": OpenRLHFProtocol(),
    "openai": JudgeProtocol(),
}


def prompt_text(sample: Sample) -> str:
    """Return the prompt as text; of a conversation, the contents of all messages."""
    prompt = sample.get("raw_prompt", "")
    if isinstance(prompt, str):
        return prompt
    return "\n".join(str(message["content"]) for message in prompt)


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
