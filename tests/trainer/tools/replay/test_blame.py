"""`verl-like replay --blame` names the spoiled sample of 256 first.

python -m pytest tests/trainer/tools/replay/test_blame.py -m slow      # 20 runs
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from tests.integration.runs import overrides
from tests.trainer.tools.replay import poisoned
from trainer import load_config, run
from trainer.tools.replay.replay import replay
from trainer.tools.replay.what_if import Blame

SETTINGS = (
    *("trainer.backend=local", "data.train_batch_size=32", "actor_rollout_ref.rollout.n=8"),
    *("trainer.total_training_steps=1", "algorithm.adv_estimator=rloo"),
    *("algorithm.use_kl_in_reward=false", "actor_rollout_ref.actor.ppo_mini_batch_size=16"),
)
CASES = [
    *[(kind, seed) for kind in ("Shuffled", "OtherPrompt", "Observed") for seed in (1, 2, 3)],
    *[(kind, seed) for kind in ("Spam", "HugeReward", "OtherLogProbs") for seed in (4, 5, 6)],
    *[("NearlyInfiniteReward", 7), ("NotANumber", 8)],
]
FAST = ("Shuffled", "HugeReward")


@pytest.fixture(scope="module")
def sums(make_tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that solves a third of the sums, so that most tokens have a high probability."""
    folder: Path = make_tiny.make(tmp_path_factory.mktemp("sums"), sums=True)
    return folder


def first_blamed(sums: Path, folder: Path, kind: str, seed: int) -> tuple[str, str]:
    """Return the spoiled sample of a run, and the sample that `--blame` names first."""
    settings = (
        *SETTINGS,
        f"data.train_files={sums}/train.parquet",
        f"trainer.cls=tests.trainer.tools.replay.poisoned.{kind}",
        f"trainer.seed={seed}",
    )
    run(load_config(overrides(sums, folder, *settings)))
    blame = Blame()
    replay(folder, 1, blame=blame)
    assert len(blame.effects) == 256
    return (folder / "poisoned").read_text(), blame.effects[0].name


@pytest.mark.long
@pytest.mark.parametrize("kind", FAST)
def test_the_spoiled_sample_is_named_first(sums: Path, tmp_path: Path, kind: str) -> None:
    wanted, first = first_blamed(sums, tmp_path, kind, seed=11)
    assert first == wanted


@pytest.mark.slow
def test_of_20_spoiled_samples_at_least_19_are_named_first(
    sums: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(CASES) == 20
    assert {kind for kind, _ in CASES} == set(poisoned.KINDS)
    pairs = {}
    for kind, seed in CASES:
        pairs[kind, seed] = first_blamed(sums, tmp_path / f"{kind}{seed}", kind, seed)
    missed = [case for case, (wanted, first) in pairs.items() if wanted != first]
    with capsys.disabled():
        print(f"\n--blame names {len(pairs) - len(missed)} of {len(pairs)} first; not {missed}")
    assert len(missed) <= 1
