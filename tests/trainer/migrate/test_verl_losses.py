"""Every verl loss next to that of the migrated command: value and gradient.

A twin is verl 0.9.1's formula for one token, with verl's defaults: it returns the token's loss and
the slope by its log-prob. `expected` aggregates as verl does, which may differ from verl's key.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping

import pytest
import torch

from tests.trainer.migrate.words import translated_whole
from trainer.config.schema import RunConfig
from trainer.ppo.recipe import load_config
from workers.losses.registry import POLICY_LOSSES, get_policy_loss, traits_of

Token = tuple[float, float, float]
"""(old log-prob, log-prob, advantage)."""
Rows = list[list[tuple[float, float]]]
"""Of every token of every row the loss and its slope."""
Settings = Mapping[str, float]
ACTOR = "actor_rollout_ref.actor"
WIDTH = 4
DEFAULTS: Settings = {
    f"{ACTOR}.clip_ratio_low": 0.2,
    f"{ACTOR}.clip_ratio_high": 0.2,
    f"{ACTOR}.clip_ratio_c": 3.0,
    f"{ACTOR}.tau_pos": 1.0,
    f"{ACTOR}.tau_neg": 1.05,
    f"{ACTOR}.policy_loss.clip_cov_ratio": 0.0002,
    f"{ACTOR}.policy_loss.clip_cov_lb": 1.0,
    f"{ACTOR}.policy_loss.clip_cov_ub": 5.0,
    f"{ACTOR}.policy_loss.kl_cov_ratio": 0.0002,
    f"{ACTOR}.policy_loss.ppo_kl_coef": 0.1,
}
"""verl's. Of `dro_beta` it has none."""


def clamp(number: float, lowest: float, highest: float) -> float:
    return min(max(number, lowest), highest)


def clipped(ratio: float, advantage: float, s: Settings) -> tuple[float, float]:
    low, high = 1 - s[f"{ACTOR}.clip_ratio_low"], 1 + s[f"{ACTOR}.clip_ratio_high"]
    free, bounded = -advantage * ratio, -advantage * clamp(ratio, low, high)
    return max(free, bounded), free if free >= bounded else 0.0


def vanilla(token: Token, s: Settings) -> tuple[float, float]:
    old, new, advantage = token
    loss, slope = clipped(math.exp(new - old), advantage, s)
    most = -advantage * s[f"{ACTOR}.clip_ratio_c"]
    return (most, 0.0) if advantage < 0 and loss > most else (loss, slope)


def sapo(token: Token, s: Settings) -> tuple[float, float]:
    old, new, advantage = token
    ratio = math.exp(new - old)
    tau = s[f"{ACTOR}.tau_pos"] if advantage > 0 else s[f"{ACTOR}.tau_neg"]
    gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
    return -advantage * 4 / tau * gate, -advantage * 4 * gate * (1 - gate) * ratio


def gpg(token: Token, s: Settings) -> tuple[float, float]:
    _, new, advantage = token
    return -advantage * new, -advantage


def cispo(token: Token, s: Settings) -> tuple[float, float]:
    old, new, advantage = token
    low, high = 1 - s[f"{ACTOR}.clip_ratio_low"], 1 + s[f"{ACTOR}.clip_ratio_high"]
    weight = clamp(math.exp(new - old), low, high)
    return -advantage * weight * new, -advantage * weight


def dro(token: Token, s: Settings) -> tuple[float, float]:
    old, new, advantage = token
    beta = s[f"{ACTOR}.policy_loss.dro_beta"]
    return -advantage * new + beta / 2 * (new - old) ** 2, -advantage + beta * (new - old)


def dppo(divergence: Callable[[float, float], float]) -> Callable[[Token, Settings], Rows]:
    def twin(token: Token, s: Settings) -> tuple[float, float]:
        old, new, advantage = token
        far, moved = divergence(math.exp(old), math.exp(new)), new - old
        up = advantage > 0 and moved > 0 and far > s[f"{ACTOR}.clip_ratio_high"]
        down = advantage <= 0 and moved < 0 and far > s[f"{ACTOR}.clip_ratio_low"]
        weight = 0.0 if up or down else min(math.exp(moved), s[f"{ACTOR}.clip_ratio_c"])
        return -advantage * weight * new, -advantage * weight

    return twin


def binary_kl(old: float, new: float) -> float:
    return old * math.log(old / new) + (1 - old) * math.log((1 - old) / (1 - new))


BY_TOKEN = {
    "vanilla": vanilla,
    "sapo": sapo,
    "gpg": gpg,
    "cispo": cispo,
    "dro": dro,
    "dppo_tv": dppo(lambda old, new: abs(new - old)),
    "dppo_kl": dppo(binary_kl),
}


def gspo(rows: list[list[Token]], s: Settings) -> Rows:
    losses: Rows = []
    for row in rows:
        ratio = math.exp(statistics.mean(new - old for old, new, _ in row))
        losses.append([clipped(ratio, advantage, s) for *_, advantage in row])
    return losses


def geo_mean(rows: list[list[Token]], s: Settings) -> Rows:
    """Every token of a row gets the row's loss; its slope is scaled by the number of tokens."""
    low, high = s[f"{ACTOR}.clip_ratio_low"], s[f"{ACTOR}.clip_ratio_high"]
    losses: Rows = []
    for row in rows:
        moved = [
            min(new - old, high) if advantage > 0 else max(new - old, -low)
            for old, new, advantage in row
        ]
        loss = -statistics.mean(token[2] for token in row) * math.exp(statistics.mean(moved))
        is_free = [x == new - old for x, (old, new, _) in zip(moved, row, strict=True)]
        losses.append([(loss, loss if free else 0.0) for free in is_free])
    return losses


def covariances(rows: list[list[Token]]) -> list[float]:
    tokens = [token for row in rows for token in row]
    mean = statistics.mean(new for _, new, _ in tokens)
    mean_advantage = statistics.mean(advantage for *_, advantage in tokens)
    return [(advantage - mean_advantage) * (new - mean) for _, new, advantage in tokens]


def kl_cov(rows: list[list[Token]], s: Settings) -> Rows:
    found = covariances(rows)
    count = max(int(s[f"{ACTOR}.policy_loss.kl_cov_ratio"] * len(found)), 1)
    least, left = sorted(found)[-count], iter(found)
    losses: Rows = []
    for row in rows:
        losses.append([])
        for old, new, advantage in row:
            weight = s[f"{ACTOR}.policy_loss.ppo_kl_coef"] if next(left) >= least else 0.0
            free, sign = -advantage * math.exp(new - old), math.copysign(1.0, new - old)
            losses[-1].append((free + weight * abs(new - old), free + weight * sign))
    return losses


def clip_cov(rows: list[list[Token]], s: Settings) -> Rows:
    """Use a ratio that takes every candidate; otherwise verl draws among them."""
    least, largest = (s[f"{ACTOR}.policy_loss.clip_cov_{name}"] for name in ("lb", "ub"))
    left = iter(covariances(rows))
    losses: Rows = []
    for row in rows:
        losses.append([])
        for old, new, advantage in row:
            is_dropped = least < next(left) < largest
            loss = clipped(math.exp(new - old), advantage, s)
            losses[-1].append((0.0, 0.0) if is_dropped else loss)
    return losses


BY_ROWS = {"gspo": gspo, "geo_mean": geo_mean, "kl_cov": kl_cov, "clip_cov": clip_cov}
MODES = (
    *("", "token-mean", "seq-mean-token-mean", "seq-mean-token-sum"),
    *("seq-mean-token-sum-norm", "token-sum"),
)
"""What a command may say; "" says nothing, which is token-mean there."""
CASES: list[tuple[str, Settings]] = [
    *((name, {}) for name in BY_TOKEN if name != "dro"),
    *((name, {}) for name in BY_ROWS if name != "clip_cov"),
    ("vanilla", {f"{ACTOR}.clip_ratio": 0.05}),
    ("vanilla", {f"{ACTOR}.clip_ratio": 0.05, f"{ACTOR}.clip_ratio_high": 0.4}),
    ("gspo", {f"{ACTOR}.clip_ratio_low": 0.01, f"{ACTOR}.clip_ratio_high": 0.02}),
    ("sapo", {f"{ACTOR}.tau_pos": 2.0, f"{ACTOR}.tau_neg": 3.0}),
    ("dro", {f"{ACTOR}.policy_loss.dro_beta": 0.3}),
    ("kl_cov", {f"{ACTOR}.policy_loss.kl_cov_ratio": 0.4}),
    ("kl_cov", {f"{ACTOR}.policy_loss.ppo_kl_coef": 0.5}),
    ("clip_cov", {f"{ACTOR}.policy_loss.clip_cov_ratio": 1.0}),
    (
        "clip_cov",
        {
            f"{ACTOR}.policy_loss.clip_cov_ratio": 1.0,
            f"{ACTOR}.policy_loss.clip_cov_lb": 0.1,
            f"{ACTOR}.policy_loss.clip_cov_ub": 2.0,
        },
    ),
]


def rows_for(loss: str) -> list[list[Token]]:
    """Return rows of 4, 2 and 1 tokens.

    The losses that choose tokens get log-probs that all rose by 0.05: then those of the old policy
    and of the policy, by which verl chooses, have one order.
    """
    torch.manual_seed(3)
    shift = 0.05 if traits_of(POLICY_LOSSES[loss]).choose_tokens else None
    rows: list[list[Token]] = []
    for length in (4, 2, 1):
        rows.append([])
        for old, moved, advantage in torch.randn(length, 3, dtype=torch.float64).tolist():
            new = -1.5 + 0.7 * old + (0.4 * moved if shift is None else shift)
            rows[-1].append((-1.5 + 0.7 * old, min(new, -0.05), 2.5 * advantage))
    return rows


def expected(loss: str, mode: str, settings: Settings) -> tuple[float, list[list[float]]]:
    """Return verl's loss and its gradient."""
    rows = rows_for(loss)
    if loss in BY_TOKEN:
        tokens = [[BY_TOKEN[loss](token, settings) for token in row] for row in rows]
    else:
        tokens = BY_ROWS[loss](rows, settings)
    if loss in ("sapo", "geo_mean"):
        mode = "seq-mean-token-mean"
    parts = []
    for row in rows:
        divisor = {
            "token-mean": sum(map(len, rows)),
            "seq-mean-token-mean": len(rows) * len(row),
            "seq-mean-token-sum": len(rows),
            "seq-mean-token-sum-norm": len(rows) * WIDTH,
            "token-sum": 1,
        }[mode or "token-mean"]
        parts.append(1 / divisor)
    total = sum(part * value for part, row in zip(parts, tokens, strict=True) for value, _ in row)
    gradient = [[part * slope for _, slope in row] for part, row in zip(parts, tokens, strict=True)]
    return total, gradient


def migrated(loss: str, mode: str, settings: Settings) -> RunConfig:
    words = [
        "data.train_files=x actor_rollout_ref.model.path=y algorithm.adv_estimator=grpo",
        f"actor_rollout_ref.rollout.n=2 {ACTOR}.policy_loss.loss_mode={loss}",
        *(f"{key}={value}" for key, value in settings.items()),
        *([f"{ACTOR}.loss_agg_mode={mode}"] if mode else []),
    ]
    return load_config(translated_whole("verl", " ".join(words)).overrides())


def column(rows: list[list[Token]], which: int) -> torch.Tensor:
    padded = [[token[which] for token in row] + [0.0] * (WIDTH - len(row)) for row in rows]
    return torch.tensor(padded, dtype=torch.float64)


@pytest.mark.parametrize(
    ("loss", "given", "mode"),
    [
        *(("vanilla", {}, mode) for mode in MODES),
        *((*case, MODES[number % len(MODES)]) for number, case in enumerate(CASES)),
    ],
)
def test_a_migrated_command_has_verls_loss(loss: str, given: Settings, mode: str) -> None:
    value, gradient = expected(loss, mode, {**DEFAULTS, **given})
    actor = migrated(loss, mode, given).actor_rollout_ref.actor
    rows = rows_for(loss)
    old, new, advantages = (column(rows, which) for which in range(3))
    mask = torch.tensor([[place < len(row) for place in range(WIDTH)] for row in rows])
    new.requires_grad_()
    found, _ = get_policy_loss(actor.policy_loss.loss_mode)(
        old_log_prob=old,
        log_prob=new,
        advantages=advantages,
        response_mask=mask,
        loss_agg_mode=actor.loss_agg_mode,
        config=actor,
    )
    found.backward()
    assert found.item() == pytest.approx(value)
    assert new.grad is not None
    for ours, theirs, row in zip(new.grad.tolist(), gradient, rows, strict=True):
        assert ours[: len(row)] == pytest.approx(theirs)


def test_every_loss_of_verls_has_a_twin() -> None:
    assert {loss for loss, _ in CASES} == BY_TOKEN.keys() | BY_ROWS.keys()
    # luspo and reinforce are no names of verl's
    assert POLICY_LOSSES.keys() - {"luspo", "reinforce"} == BY_TOKEN.keys() | BY_ROWS.keys()


def test_what_a_loss_cannot_have_of_verls_is_told() -> None:
    base = "data.train_files=x actor_rollout_ref.model.path=y actor_rollout_ref.rollout.n=2"
    base += " actor_rollout_ref.rollout.name=vllm"

    def told(words: str) -> str:
        done = translated_whole("verl", f"{base} {words}")
        return "\n".join([*done.renamed, *done.absent, *done.unread])

    loss = f"{ACTOR}.policy_loss.loss_mode"
    assert "in verl, per micro-batch by the new ones" in told(f"{loss}=kl_cov")
    assert "in verl, per micro-batch by the new ones" in told(f"{loss}=clip_cov")
    assert "older verl" in told(f"{loss}=gspo")
    assert f"{ACTOR}.clip_ratio=0.1" in told(f"{ACTOR}.clip_ratio=0.1")
    weighed = "algorithm.rollout_correction.rollout_is=token"
    assert "geometric mean" in told(f"{loss}=geo_mean {weighed}")
    assert "entropy and KL" in told(f"{loss}=sapo {ACTOR}.entropy_coeff=0.01")
    bypass = "algorithm.rollout_correction.bypass_mode=True"
    assert f"{loss}=vanilla" in told(f"{loss}=gspo {bypass}")


def test_the_critic_keeps_the_aggregation_that_verl_gives_it() -> None:
    done = translated_whole(
        "verl",
        "data.train_files=x actor_rollout_ref.model.path=y critic.model.path=y "
        f"{ACTOR}.policy_loss.loss_mode=sapo",
    )
    config = load_config(done.overrides())
    assert config.actor_rollout_ref.actor.loss_agg_mode == "seq-mean-token-mean"
    assert config.critic.loss_agg_mode == "token-mean"
