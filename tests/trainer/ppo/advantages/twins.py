"""A twin of every estimator in plain Python: numbers one at a time, in lists of rows of tokens.

A twin takes a `Case` and returns (advantages, returns).
"""

import math
import statistics
from dataclasses import dataclass, field

from tests.trainer.ppo.advantages.plain_python import INDEX, ROWS, WIDTH, positions, whitened_rows


@dataclass
class Case:
    """The inputs of estimators, as lists; entries outside the mask are never read."""

    rewards: list
    values: list
    mask: list
    old_log_probs: list
    sum_pi_squared: list
    step_ends: list
    baselines: list
    named: list
    settings: dict = field(default_factory=dict)

    def scores(self):
        return [sum(self.rewards[row][t] for t in positions(self.mask[row])) for row in range(ROWS)]


def group_of(row):
    return [other for other in range(ROWS) if INDEX[other] == INDEX[row]]


def on_tokens(scores, case):
    return [
        [scores[row] if case.mask[row][t] else 0.0 for t in range(WIDTH)] for row in range(ROWS)
    ]


def of_scores(advantage):
    """Return the twin of an estimator with one advantage per row."""

    def twin(case):
        scores, advantages = case.scores(), []
        for row in range(ROWS):
            group = [scores[other] for other in group_of(row)]
            others = [scores[other] for other in group_of(row) if other != row]
            advantages.append(advantage(scores[row], group, others, case))
        return on_tokens(advantages, case), on_tokens(advantages, case)

    return twin


def centered(score, group, others, case):
    return score - statistics.mean(group) if others else score


def grpo(score, group, others, case):
    if not others or not case.settings.get("norm_adv_by_std_in_grpo", True):
        return centered(score, group, others, case)
    return (score - statistics.mean(group)) / (statistics.stdev(group) + 1e-6)


def grpo_batch_std(score, group, others, case):
    if not others:
        return score
    return (score - statistics.mean(group)) / (statistics.stdev(case.scores()) + 1e-6)


def grpo_passk(score, group, others, case):
    if not others:
        return score
    if score < max(group):
        return 0.0
    divides = case.settings.get("norm_adv_by_std_in_grpo", True)
    return (score - max(others)) / (statistics.stdev(group) + 1e-6 if divides else 1.0)


def rloo(score, group, others, case):
    return score - (statistics.mean(others) if others else 0.0)


def gpg(score, group, others, case):
    scale = ROWS / max(sum(score != 0 for score in case.scores()), 1)
    return scale * centered(score, group, others, case)


def opo(case):
    scores, advantages = case.scores(), []
    for row in range(ROWS):
        lengths = [len(positions(case.mask[other])) for other in group_of(row)]
        group = [scores[other] for other in group_of(row)]
        total = sum(length * score for length, score in zip(lengths, group, strict=True))
        advantages.append(scores[row] - total / sum(lengths) if len(group) > 1 else scores[row])
    return on_tokens(advantages, case), on_tokens(advantages, case)


def maybe_whitened(advantages, case):
    return whitened_rows(advantages, case.mask) if case.settings.get("whiten", True) else advantages


def reinforce_plus_plus_baseline(case):
    advantages, _ = of_scores(centered)(case)
    advantages = maybe_whitened(advantages, case)
    return advantages, advantages


def gdpo(case):
    weights = case.settings.get("gdpo_reward_weights") or [1.0] * len(case.named)
    total = [0.0] * ROWS
    for rewards, weight in zip(case.named, weights, strict=True):
        for row in range(ROWS):
            group = [rewards[other] for other in group_of(row)]
            known = [reward for reward in group if not math.isnan(reward)]
            mean = statistics.mean(known) if known else 0.0
            filled = [mean if math.isnan(reward) else reward for reward in group]
            reward = mean if math.isnan(rewards[row]) else rewards[row]
            others = filled[1:]
            total[row] += weight * grpo(reward, filled, others, case)
    advantages = maybe_whitened(on_tokens(total, case), case)
    return advantages, advantages


def later_sums(rows, case, decay):
    """Sum every token's number and all later ones of its row, decayed by `decay` per step."""
    sums = [[0.0] * WIDTH for _ in range(ROWS)]
    for row in range(ROWS):
        later = 0.0
        for t in reversed(positions(case.mask[row])):
            later = rows[row][t] + decay * later
            sums[row][t] = later
    return sums


def reinforce_plus_plus(case):
    returns = later_sums(case.rewards, case, case.settings.get("gamma", 1.0))
    return maybe_whitened(returns, case), returns


def remax(case):
    returns = later_sums(case.rewards, case, 1.0)
    advantages = [
        [returns[row][t] - case.baselines[row] if case.mask[row][t] else 0.0 for t in range(WIDTH)]
        for row in range(ROWS)
    ]
    return advantages, returns


def gae(case):
    gamma, lam = case.settings.get("gamma", 1.0), case.settings.get("lam", 1.0)
    truncated = case.settings.get("truncated") or [False] * ROWS
    advantages = [[0.0] * WIDTH for _ in range(ROWS)]
    returns = [[0.0] * WIDTH for _ in range(ROWS)]
    for row in range(ROWS):
        places = positions(case.mask[row])
        next_value = case.values[row][places[-1]] if places and truncated[row] else 0.0
        next_advantage = 0.0
        for t in reversed(places):
            error = case.rewards[row][t] + gamma * next_value - case.values[row][t]
            next_advantage = error + gamma * lam * next_advantage
            next_value = case.values[row][t]
            advantages[row][t], returns[row][t] = next_advantage, next_advantage + next_value
    return maybe_whitened(advantages, case), returns


def coati(case):
    advantages, rewards = [], case.scores()
    for row in range(ROWS):
        places = positions(case.mask[row])
        advantages.append(rewards[row] - case.values[row][places[-1]] if places else 0.0)
    return on_tokens(advantages, case), on_tokens(rewards, case)


def grpo_process(case):
    steps = {}
    for row in range(ROWS):
        for t in positions(case.mask[row]):
            if case.step_ends[row][t]:
                steps.setdefault(INDEX[row], []).append((row, t, case.rewards[row][t]))
    scores = [[0.0] * WIDTH for _ in range(ROWS)]
    for of_group in steps.values():
        group = [score for *_, score in of_group]
        for row, t, score in of_group:
            scores[row][t] = grpo(score, group, group[1:], case)
    advantages = later_sums(scores, case, 1.0)
    return advantages, advantages


def rloo_process(case):
    ends = [
        [t for t in positions(m) if e[t]] for m, e in zip(case.mask, case.step_ends, strict=True)
    ]
    to_go = [
        [sum(case.rewards[row][t] for t in ends[row][step:]) for step in range(len(ends[row]))]
        for row in range(ROWS)
    ]
    advantages = [[0.0] * WIDTH for _ in range(ROWS)]
    for row in range(ROWS):
        for t in positions(case.mask[row]):
            step = sum(end < t for end in ends[row])
            if step < len(ends[row]):
                others = [to_go[o][step] for o in group_of(row) if o != row and step < len(ends[o])]
                advantages[row][t] = to_go[row][step] - (statistics.mean(others) if others else 0.0)
    return advantages, advantages


def optimal_token_baseline(case):
    returns = later_sums(case.rewards, case, 1.0)
    advantages = [[0.0] * WIDTH for _ in range(ROWS)]
    for row in range(ROWS):
        for number, t in enumerate(positions(case.mask[row])):
            total = weighed = 0.0
            for other in group_of(row) if len(group_of(row)) > 1 else []:
                places = positions(case.mask[other])
                if number < len(places):
                    weight = sum(squared_norm(case, other, s) for s in places[: number + 1])
                    total += weight
                    weighed += weight * returns[other][places[number]]
            advantages[row][t] = returns[row][t] - (weighed / total if total else 0.0)
    return advantages, returns


def squared_norm(case, row, t):
    """Return the squared norm of the gradient of log softmax: 1 - p at the token, -p elsewhere."""
    return 1 - 2 * math.exp(case.old_log_probs[row][t]) + case.sum_pi_squared[row][t]


TWINS = {
    "coati": coati,
    "gae": gae,
    "gdpo": gdpo,
    "gpg": of_scores(gpg),
    "grpo": of_scores(grpo),
    "grpo_vectorized": of_scores(grpo),
    "grpo_batch_std": of_scores(grpo_batch_std),
    "grpo_passk": of_scores(grpo_passk),
    "grpo_process": grpo_process,
    "rloo_process": rloo_process,
    "opo": opo,
    "optimal_token_baseline": optimal_token_baseline,
    "tir_optimal_token_baseline": optimal_token_baseline,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "remax": remax,
    "rloo": of_scores(rloo),
    "rloo_vectorized": of_scores(rloo),
}
SETTINGS = {
    "gae": [
        {"gamma": 1.0, "lam": 1.0},
        {"gamma": 0.9, "lam": 0.8, "whiten": False},
        {"gamma": 0.99, "lam": 0.0},
        {"gamma": 0.0, "lam": 1.0},
        {"gamma": 0.9, "lam": 0.8, "truncated": [True, False, True, True, False, True, False]},
    ],
    "gdpo": [
        {},
        {"gdpo_reward_weights": [2.0, -0.5, 1.0], "whiten": False},
        {"norm_adv_by_std_in_grpo": False},
    ],
    "grpo": [{}, {"norm_adv_by_std_in_grpo": False}],
    "grpo_passk": [{}, {"norm_adv_by_std_in_grpo": False}],
    "grpo_process": [{}, {"norm_adv_by_std_in_grpo": False}],
    "reinforce_plus_plus": [{}, {"gamma": 0.9, "whiten": False}],
    "reinforce_plus_plus_baseline": [{}, {"whiten": False}],
}
"""The settings that a twin is compared with."""
