"""The log accounts for every sample and token: trained, queued, in flight or dropped."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.workers.samples import make_batch
from trainer.observers.sample_log import (
    QUEUED,
    STEP_AGAIN,
    USER_CODE,
    SampleLog,
    SampleWatch,
    tokens_by_sample,
)
from trainer.ppo.config import PPOConfig
from trainer.ppo.stages import PPOTrainer
from trainer.ppo.updating import EntropyController
from trainer.run_folder.accounts import describe_log
from verl_like.batch.protocol import DataProto
from verl_like.errors import SampleLogError
from workers.agents.trajectory import GIVEN_UP
from workers.rewards.weighted import SKIPPED

ROWS = 8


def pairs(*uids: str) -> list[tuple[str, int]]:
    """Return two samples of each prompt."""
    return [(uid, index) for uid in uids for index in range(2)]


def filled() -> SampleLog:
    """A log with a trained, b queued and c in flight by generator 0; generator 1 lost d."""
    log = SampleLog()
    log.begin(0, pairs("a", "b", "c"))
    log.begin(1, pairs("d"))
    log.receive(dict(zip(pairs("a", "b"), [4, 6, 8, 12], strict=True)), {GIVEN_UP: 5})
    facts = {("a", 0): {"staleness": 2}, ("a", 1): {"staleness": 1}}
    log.train({("a", 0): 4, ("a", 1): 6}, facts)
    log.drop(pairs("d"), "lost with its generator")
    return log


def test_the_log_accounts_for_every_sample_and_token() -> None:
    log = filled()
    log.check()
    state = log.state_dict()
    row = {"made": 6, "trained": 2, "queued": 2, "dropped": {}, "in_flight": 2}
    assert state["generators"]["0"] == row
    assert state["generators"]["1"]["dropped"] == {"lost with its generator": 2}
    tokens = {"sampled": 35, "trained": 10, "queued": 20, "left_out": {GIVEN_UP: 5}}
    assert state["tokens"] == tokens
    assert state["staleness"] == {"1": 1, "2": 1}
    text = describe_log(state)
    assert text.splitlines()[1].split() == ["generator", "0", "6", "2", "2", "0", "2"]
    assert text.splitlines()[3].split() == ["all", "8", "2", "2", "2", "2"]
    assert "dropped: 2 (lost with its generator)" in text
    assert "tokens: 35 sampled = 10 trained + 20 queued + 5 excluded" in text


def test_generating_an_open_sample_or_training_a_closed_one_is_an_error() -> None:
    log = filled()
    with pytest.raises(SampleLogError, match="sample b/0 is already queued.*step 1"):
        log.begin(1, pairs("b"))
    with pytest.raises(SampleLogError, match="sample a/0 is not open"):
        log.train({("a", 0): 4})


def test_an_update_with_a_wrong_number_of_tokens_is_an_error() -> None:
    with pytest.raises(SampleLogError, match=r"\(1 in all\): b/1 \(11 instead of 12\)"):
        filled().train({("b", 0): 8, ("b", 1): 11})


def totals(log: SampleLog) -> dict[str, Any]:
    """Return how many samples of all accounts were made, trained on and dropped."""
    accounts = log.accounts.values()
    dropped = sum((account.dropped for account in accounts), Counter[str]())
    generated, trained = (
        sum(getattr(a, name) for a in accounts) for name in ("generated", "trained")
    )
    return {"made": generated, "trained": trained, "dropped": dict(dropped)}


def test_a_filter_that_adds_tokens_is_an_error() -> None:
    with pytest.raises(SampleLogError, match="b/0 has 9 tokens after skip, and had 8 before"):
        filled().reduce_tokens("skip", {("b", 0): 9}, [("b", 0)])


def test_a_wrong_count_of_samples_is_an_error() -> None:
    log = filled()
    log.accounts[0].generated += 1
    with pytest.raises(SampleLogError, match="generator or step 0 do not add up"):
        log.check()


def test_a_wrong_count_of_tokens_is_an_error() -> None:
    log = filled()
    log.trained_tokens -= 1
    with pytest.raises(SampleLogError, match="tokens of the run do not add up: {'sampled': 35"):
        log.check()


def test_a_resume_drops_open_samples_that_are_not_restored() -> None:
    log = SampleLog()
    log.load_state_dict(filled().state_dict())
    log.check()
    assert log.accounts[0].dropped == {"repeated after a resume": 4}
    assert log.left_out["repeated after a resume"] == 20
    log.restore(0, dict(zip(pairs("b"), [8, 12], strict=True)))
    log.begin(0, pairs("c"))
    assert log.open(QUEUED) == pairs("b")
    assert log.state_dict()["tokens"] == filled().state_dict()["tokens"]


def test_repeated_steps_drop_their_earlier_samples() -> None:
    log = SampleLog()
    for step in (1, 2, 3):
        log.begin(step, pairs(str(step)))
    log.train(dict.fromkeys(pairs("1", "2"), 0))
    log.drop_after(1, STEP_AGAIN)
    log.begin(2, pairs("2"))
    log.train(dict.fromkeys(pairs("2"), 0))
    log.check()
    assert totals(log) == {"made": 8, "trained": 4, "dropped": {STEP_AGAIN: 4}}


# ------------------------------------------------------------------ the watch of a step


@pytest.fixture
def batch() -> DataProto:
    """Two samples each of four prompts: two are cut, two are skipped, two have a score."""
    samples = make_batch(ROWS)
    samples.non_tensor_batch["uid"] = np.array([f"{row // 2}-0" for row in range(ROWS)], object)
    samples.batch["sample_index"] = torch.arange(2).repeat(ROWS // 2)
    reasons = ["length", "length", *["stop"] * (ROWS - 2)]
    samples.non_tensor_batch["finish_reason"] = np.array(reasons, object)
    samples.non_tensor_batch[SKIPPED] = np.array([0.0, 1.0, 1.0, *[0.0] * (ROWS - 3)])
    scores = torch.zeros_like(samples.batch["response_mask"], dtype=torch.float32)
    scores[3, 0], scores[4, 0] = 1.0, -1.0
    samples.batch["token_level_scores"] = scores
    return samples


class Trainer:
    """Steps of a recipe's own class, as far as the observer sees them."""

    __module__ = "trainer.here"

    def __init__(self) -> None:
        self.run, self.global_step = SimpleNamespace(callbacks=()), 1
        self.origins = None


def watched(batch: DataProto, config: PPOConfig, to_update: DataProto | None = None) -> Any:
    """Return the metrics of a step whose update gets this batch, and the log's totals."""
    watch, trainer, metrics = SampleWatch(), Trainer(), dict[str, float]()
    watch.on_init_end(trainer)
    watch.on_generated(trainer, batch)
    batch = batch if to_update is None else to_update
    watch.on_stage_begin(trainer, "update", batch)
    config.trainer.critic_warmup = 1  # no role is trained in this step
    stage: Any = SimpleNamespace(
        config=config,
        global_step=1,
        groups={},
        balance=lambda rows: (rows, {}),
        call_hook=lambda hook, *args: getattr(watch, hook)(trainer, *args),
        entropy_ctrl=EntropyController(config.actor_rollout_ref.actor),
    )
    PPOTrainer.update(stage, batch)
    watch.on_step_end(trainer, metrics)
    names = "training/num_excluded_tokens/"
    left_out = {n.removeprefix(names): v for n, v in metrics.items() if n.startswith(names)}
    return left_out, totals(watch.log)


def test_excluded_samples_and_tokens_are_counted_by_reason(batch: DataProto) -> None:
    config, counts = PPOConfig(), list(tokens_by_sample(batch).values())
    left_out, samples = watched(batch, config)
    assert left_out == {"on_failure=skip": counts[1] + counts[2]}
    assert samples == {"made": 8, "trained": 6, "dropped": {"on_failure=skip": 2}}

    config.algorithm.mask_truncated = True
    left_out, samples = watched(batch, config)
    assert left_out == {
        "algorithm.mask_truncated": counts[0] + counts[1],
        "on_failure=skip": counts[2],
    }
    dropped = {"algorithm.mask_truncated": 2, "on_failure=skip": 1}
    assert samples == {"made": 8, "trained": 5, "dropped": dropped}

    batch.batch["response_mask"][7] = 0
    assert watched(batch, config)[1]["dropped"]["no token"] == 1


def test_a_sample_that_is_resampled_twice_for_an_update_counts_once(batch: DataProto) -> None:
    config, counts = PPOConfig(), list(tokens_by_sample(batch).values())
    config.algorithm.use_pf_ppo = True
    config.algorithm.pf_ppo.reweight_method = "pow"
    left_out, samples = watched(batch, config)
    assert left_out["algorithm.use_pf_ppo"] == counts[0] + sum(counts[5:])
    dropped = {"on_failure=skip": 2, "algorithm.use_pf_ppo": 4}
    assert samples == {"made": 8, "trained": 2, "dropped": dropped}


def test_samples_rejected_by_the_rollout_correction_are_counted(batch: DataProto) -> None:
    config = PPOConfig()
    config.algorithm.rollout_correction.rollout_rs = "token_k1"
    config.algorithm.rollout_correction.rollout_rs_threshold = "0.5_2.0"
    batch.batch["rollout_log_probs"] = batch.batch["old_log_probs"].clone()
    batch.batch["rollout_log_probs"][[5, 6]] += 9.0
    assert watched(batch, config)[1]["dropped"]["algorithm.rollout_correction"] == 2


def test_lost_changed_or_repeated_samples_end_the_run(
    batch: DataProto, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = batch.select(deepcopy=True)
    changed.batch["response_mask"][3, 0] = 0
    doubled = DataProto.concat([batch, batch[:1]])
    for wrong, problem in (
        (batch[1:], r"of sample 0-0/0, the rollout sampled \d+, the update gets none"),
        (changed, r"the rollout sampled (\d+), the update gets (?!\1)\d"),
        (doubled, "a sample occurs twice"),
    ):
        with pytest.raises(SampleLogError, match=f"tokens of step 1 do not add up: .*{problem}"):
            watched(batch, PPOConfig(), wrong)

    monkeypatch.setattr(Trainer, "__module__", "of_a_user")
    left_out, samples = watched(batch, PPOConfig(), batch[1:])
    assert left_out[USER_CODE] == tokens_by_sample(batch)["0-0", 0]
    assert samples["dropped"][USER_CODE] == 1
