"""The mismatch gauge against plain numpy, and the verdicts of the self-test."""

import numpy as np
import pytest
import torch

from tests.integration.runs import POLICY_ALONE, overrides
from trainer import PPOTrainer, load_config, run
from trainer.ppo.rollout_gap import diagnose_rollout_gap, explain_gap
from workers.losses import aggregate
from workers.losses.kl import MismatchGauge


def columns(rows=13, width=11, seed=0):
    generator = torch.Generator().manual_seed(seed)
    rollout = -3 * torch.rand(rows, width, generator=generator)
    trained = rollout + 0.3 * torch.randn(rows, width, generator=generator)
    mask = (
        torch.arange(width) < torch.randint(0, width + 1, (rows, 1), generator=generator)
    ).long()
    mask[0] = 0
    trained[mask == 0] = torch.nan
    return rollout, trained, mask


def metrics_of(*chunks):
    gauge = MismatchGauge(chunks[0][0].shape[1])
    for chunk in chunks:
        gauge.add(*chunk)
    return gauge.metrics()


def test_the_metrics_equal_their_definitions():
    rollout, trained, mask = (column.double().numpy() for column in columns())
    r, t = rollout[mask == 1], trained[mask == 1]
    diff = np.abs(np.exp(r) - np.exp(t))

    responses = [row for row in zip(rollout, trained, mask, strict=True) if row[2].any()]
    rows = [(a[m == 1], b[m == 1]) for a, b, m in responses]
    log_ppl = np.array([(-a.mean(), -b.mean()) for a, b in rows])
    gap = log_ppl[:, 1] - log_ppl[:, 0]
    expected = {
        "training/rollout_probs_diff_max": diff.max(),
        "training/rollout_probs_diff_mean": diff.mean(),
        "training/rollout_probs_diff_std": diff.std(ddof=1),
        "training/rollout_actor_probs_pearson_corr": np.corrcoef(np.exp(r), np.exp(t))[0, 1],
        "rollout_corr/kl": (r - t).mean(),
        "rollout_corr/k3_kl": (np.exp(t - r) - (t - r) - 1).mean(),
        "rollout_corr/chi2_token": np.exp(2 * (t - r)).mean() - 1,
        "rollout_corr/chi2_seq": np.mean([np.exp(2 * (b - a).sum()) for a, b in rows]) - 1,
        "rollout_corr/training_ppl": np.exp(log_ppl[:, 1]).mean(),
        "rollout_corr/training_log_ppl": log_ppl[:, 1].mean(),
        "rollout_corr/rollout_ppl": np.exp(log_ppl[:, 0]).mean(),
        "rollout_corr/rollout_log_ppl": log_ppl[:, 0].mean(),
        "rollout_corr/log_ppl_diff": gap.mean(),
        "rollout_corr/log_ppl_abs_diff": np.abs(gap).mean(),
        "rollout_corr/log_ppl_diff_max": gap.max(),
        "rollout_corr/log_ppl_diff_min": gap.min(),
        "rollout_corr/ppl_ratio": np.exp(gap).mean(),
    }
    for first, end in ((0, 1), (1, 2), (2, 4), (4, 8), (8, 16)):
        inside = mask[:, first:end] == 1
        expected[f"rollout_corr/gap_from_token_{first}"] = np.abs(rollout - trained)[:, first:end][
            inside
        ].mean()
    assert metrics_of(columns()) == pytest.approx(expected, rel=1e-9)


def test_chunks_add_up_and_only_tokens_inside_the_mask_count():
    rollout, trained, mask = columns()
    parts = [(rollout[a:b], trained[a:b], mask[a:b]) for a, b in ((0, 1), (1, 5), (5, 13))]
    assert metrics_of(*parts) == pytest.approx(metrics_of(columns()))
    assert metrics_of((rollout, trained, mask * 0)) == {}
    same = metrics_of((rollout, rollout.clone(), mask))
    assert same["training/rollout_probs_diff_max"] == 0
    assert same["training/rollout_actor_probs_pearson_corr"] == pytest.approx(1)


def test_the_block_size_changes_no_metric(monkeypatch):
    whole = metrics_of(columns())
    monkeypatch.setattr(aggregate, "BLOCK_TOKENS", 22)
    assert metrics_of(columns()) == pytest.approx(whole)


FINE = {
    "gap": 1e-6,
    "plain_gap": 1e-6,
    "stale": False,
    "quantization": None,
    "dtype": "float32",
}


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({}, "none"),
        ({"stale": True}, "staleness"),
        ({"gap": 0.5}, "sampling semantics"),
        ({"gap": 0.5, "plain_gap": 0.4, "quantization": "fp8"}, "quantization"),
        ({"gap": 0.05, "plain_gap": 0.06, "dtype": "bfloat16"}, "dtype"),
        ({"gap": 0.5, "plain_gap": 0.5, "dtype": "bfloat16"}, "unknown"),
        ({"gap": 0.05, "plain_gap": 0.05}, "unknown"),
    ],
)
def test_a_gap_is_explained_by_its_cause(changes, cause):
    assert explain_gap(**FINE | changes)[0] == cause


class Probe(PPOTrainer):
    """Runs the self-test with right weights, truncated log-probs and stale weights."""

    def step(self):
        prompts = next(iter(self.loader))
        Probe.verdicts = [diagnose_rollout_gap(self, prompts)[0]]
        generate = self.rollouts.generate

        def truncated(batch, **settings):
            samples = generate(batch, **settings)
            if "top_k" not in settings:
                samples.batch["rollout_log_probs"] += 0.3 * samples.batch["response_mask"]
            return samples

        self.rollouts.generate = truncated
        Probe.verdicts.append(diagnose_rollout_gap(self, prompts)[0])
        self.rollouts.generate = generate
        with torch.no_grad():
            worker = self.groups["rollout"].transport.host._workers["rollout"]
            worker.engine.weights_checksum = lambda: "another"
        Probe.verdicts.append(diagnose_rollout_gap(self, prompts)[0])
        return {}


def test_the_self_test_detects_stale_weights_and_other_sampling(tiny_dir, tmp_path):
    settings = ("trainer.backend=local", "trainer.total_training_steps=1", *POLICY_ALONE)
    top_k = "actor_rollout_ref.rollout.top_k=7"
    run(load_config(overrides(tiny_dir, tmp_path, *settings, top_k)), Probe)
    assert Probe.verdicts == ["none", "sampling semantics", "staleness"]
