"""Trajectories as text, turn by turn: responses and observations, with rewards and times."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from verl_like.batch.protocol import DataProto
from workers.chats import texts_of
from workers.columns import TRAJECTORY, sample_scores, token_rows
from workers.rewards.manager import decode_rows
from workers.rewards.outcome import is_success

if TYPE_CHECKING:
    from workers.agents.chat import Message

POLICY = "assistant"
DIGITS = 6
"""Decimal places of seconds, and of rewards, which are float32."""
ENVIRONMENTS = "environments"
"""The lane of environments in the report's timeline."""
MAX_WAITS = 100
Turn = dict[str, Any]


def turn_fields(batch: DataProto, tokenizer: Any) -> dict[str, list[Any]]:
    """Map fields of trajectories to values, one per row.

    The field `turns` is a list of {role, text, reward}. A turn of the policy has the sum of its
    rewards, including those that an agent gave when it ended. It also has its number of tokens, the
    number of tokens observed after it, and its seconds. Observations, and older responses that an
    agent sends again, have no reward and none of the other fields. The first observation is part of
    the prompt.
    """
    infos = batch.non_tensor_batch[TRAJECTORY]
    sampled_ids: list[list[int]] = []
    turns_of_rows: list[list[Turn]] = []
    columns = token_rows(batch, "responses", "response_mask", "turn", "environment_rewards")
    for tokens, mask, numbers, rewards, info in zip(*columns, infos, strict=True):
        policy_turns = _policy_turns(tokens, mask != 0, numbers, rewards, sampled_ids)
        turns_of_rows.append(
            [turn for sampled in policy_turns for turn in _with_answer(sampled, info)]
        )

    texts = decode_rows(tokenizer, sampled_ids)
    for turn in (turn for turns in turns_of_rows for turn in turns if "tokens" in turn):
        turn["text"] = texts[turn["text"]]
    return {
        "turns": turns_of_rows,
        "ended": [info.get("ended") for info in infos],
        "problem": [info.get("problem") or None for info in infos],
    }


def trajectory_chats(batch: DataProto, tokenizer: Any) -> list[list[Message] | None]:
    """Return each trajectory's messages; without an environment, None for each sample.

    The messages begin with the row's prompt, or where the agent last restarted its chat.

        for messages in trajectory_chats(batch, tokenizer):
            print(messages)
    """
    columns = batch.non_tensor_batch
    if TRAJECTORY not in columns:
        return [None] * len(batch)
    from workers.agents.chat import with_observation

    chats: list[list[Message] | None] = []
    turns_of_rows = turn_fields(batch, tokenizer)["turns"]
    rows = zip(columns["raw_prompt"], columns[TRAJECTORY], turns_of_rows, strict=True)
    for prompt, info, turns in rows:
        requests = [answer.get("request", {"extends": True}) for answer in info["answers"]]
        place = max((n for n, request in enumerate(requests) if not request["extends"]), default=0)
        first = info["answers"][place] if info["answers"] else {}
        begin = first.get("messages") or with_observation(prompt, first.get("text"))
        sampled_turns = [n for n, turn in enumerate(turns) if "tokens" in turn]
        rest = turns[sampled_turns[place] :] if place < len(sampled_turns) else []
        messages = [{"role": turn["role"], "content": turn["text"]} for turn in rest]
        chats.append([*map(dict, begin), *messages])
    return chats


def success_metrics(batch: DataProto) -> dict[str, float]:
    """Return metrics of success, turns, ends and tool calls of trajectories.

    A trajectory is a success if its score is 1 or more and its environment did not fail.
    """
    from workers.rewards.environment import trajectory_metrics

    infos = batch.non_tensor_batch[TRAJECTORY]
    names = ("agents/num_turns", "agents/num_call", "agents/ended", "agents/by_environment")
    all_metrics = trajectory_metrics(infos.tolist())
    metrics = {name: value for name, value in all_metrics.items() if name.startswith(names)}
    successes: dict[str, list[bool]] = {"agents/success": []}
    for score, info in zip(sample_scores(batch).tolist(), infos, strict=True):
        is_good = is_success(score) and not info["problem"]
        successes["agents/success"].append(is_good)
        name = info.get("environment")
        if name:
            successes.setdefault(f"agents/by_environment/{name}/success", []).append(is_good)
    return {name: sum(good) / max(len(good), 1) for name, good in successes.items()} | metrics


def _policy_turns(
    tokens: np.ndarray,
    is_sampled: np.ndarray,
    numbers: np.ndarray,
    rewards: np.ndarray,
    sampled_ids: list[list[int]],
) -> list[Turn]:
    """Return the policy's turns of a row; the `text` of each is an index into `sampled_ids`."""
    end = int(is_sampled.nonzero()[0].max(initial=-1)) + 1
    tokens, is_sampled, numbers = tokens[:end], is_sampled[:end], numbers[:end]
    turns = []
    for number in np.unique(numbers[is_sampled]).tolist():
        is_in_turn = numbers == number
        ids = tokens[is_in_turn & is_sampled].tolist()
        observed = int((is_in_turn & ~is_sampled).sum())
        reward = round(float(rewards[:end][is_in_turn].sum()), DIGITS)
        turn = {"role": POLICY, "text": len(sampled_ids), "reward": reward, "turn": number}
        turns.append({**turn, "tokens": len(ids), "observed_tokens": observed})
        sampled_ids.append(ids)
    return turns


def _with_answer(turn: Turn, info: Mapping[str, Any]) -> list[Turn]:
    """Add seconds and calls to a turn; return it, followed by its observations."""
    place = turn.pop("turn") + 1
    times, answers = info["times"][place : place + 1], info["answers"][place : place + 1]
    for seconds in times:
        names = ("engine", "environment", "waiting")
        turn |= {f"{name}_s": round(seconds[name], DIGITS) for name in names}
    observed: list[Turn] = []
    for answer in answers:
        turn |= {name: answer[name] for name in ("calls", "errors") if name in answer}
        for message in answer.get("messages", ()):
            text = "".join(texts_of(message["content"], "<image>"))
            observed.append({"role": message["role"], "text": text, "reward": None})
    return [turn, *observed]


def waits_for_environments(batch: DataProto) -> list[dict[str, Any]]:
    """Return the times when trajectories waited for environments, as calls of the timeline.

    A call is an interval in which at least one trajectory waited; `busy_s` is the total working
    time of the environments' processes. Intervals are merged if the gap between them is a small
    fraction (1 / `MAX_WAITS`) of the total time.
    """
    waits = sorted(
        (wait["asked"], wait["heard"], wait["environment"])
        for info in batch.non_tensor_batch[TRAJECTORY]
        for wait in info.get("times", ())
        if wait["heard"]
    )
    if not waits:
        return []
    shortest = (max(end for _, end, _ in waits) - waits[0][0]) / MAX_WAITS
    calls: list[dict[str, Any]] = []
    for start, end, busy in waits:
        if not calls or start - calls[-1]["end"] > shortest:
            calls.append({"start": start, "end": end, "busy_s": 0.0, "num_answers": 0})
        last = calls[-1]
        last["end"] = max(last["end"], end)
        last["busy_s"] = round(last["busy_s"] + busy, DIGITS)
        last["num_answers"] += 1
    return [{"role": ENVIRONMENTS, "rank": 0, "method": ENVIRONMENTS, **call} for call in calls]
