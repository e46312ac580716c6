"""Runs with several trained players, and with several environments chosen by a column."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.integration.runs import POLICY_ALONE, lines
from tests.trainer.rollouts.test_environments import GAMES, play, rows
from trainer.observers.saved_batches import batch_file
from trainer.ppo.config import FilterGroupsConfig
from trainer.ppo.sampling import collect_groups
from trainer.rollouts.samples import repeat_prompts
from verl_like.batch.protocol import DataProto
from verl_like.errors import ConfigError
from workers.columns import PLAYERS
from workers.rollout.client import RolloutClient

DUEL = f"environment={GAMES}:Duel"
FOUR_SAMPLES = (
    *POLICY_ALONE,
    "actor_rollout_ref.rollout.n=4",
    "data.train_batch_size=2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
)


def by_hand(scores: list[float]) -> list[float]:
    """Return GRPO's advantages of one group."""
    mean = sum(scores) / len(scores)
    variance = sum((score - mean) ** 2 for score in scores) / (len(scores) - 1)
    return [(score - mean) / (variance**0.5 + 1e-6) for score in scores]


def test_players_are_trained_in_separate_groups(tiny_dir: Path, tmp_path: Path) -> None:
    more = ("trainer.batch_steps_to_keep=2",)
    play(tiny_dir, tmp_path / "run", *FOUR_SAMPLES, *more, DUEL)
    samples = rows(tmp_path / "run")
    assert len(samples) == 8 == lines(tmp_path / "run")[0]["training/num_hash_matched_samples"]
    scores: dict[tuple[str, int], float] = {}
    for row in samples:
        rewards = [turn["reward"] for turn in row["turns"] if turn["role"] == "assistant"]
        player = row["uid"].split(":")[1]
        sign = 1 if player == "white" else -1
        assert ("white" in row["input"]) == (player == "white")
        # the rewards of this player: half points for its turns, and its longest text at the end
        assert rewards[0] == 0.5
        assert rewards[-1] * sign > 0
        assert row["score"] == pytest.approx(sum(rewards))
        scores[row["uid"], row["sample"]] = row["score"]
    assert len({uid for uid, _ in scores}) == 4
    assert {index for _, index in scores} == {0, 1}

    batch = DataProto.load_from_disk(batch_file(tmp_path / "run", 1, "update"))
    advantages, mask = batch.padded("advantages"), batch.padded("response_mask").bool()
    indices = batch.padded("sample_index").tolist()
    for row, uid in enumerate(batch.non_tensor_batch["uid"]):
        group = [score for (other, _), score in sorted(scores.items()) if other == uid]
        expected = torch.tensor(by_hand(group)[indices[row]]).expand(int(mask[row].sum()))
        torch.testing.assert_close(advantages[row][mask[row]], expected, atol=1e-4, rtol=1e-4)
        assert not advantages[row][~mask[row]].any()


def test_a_column_chooses_the_environment_of_a_row(tiny_dir: Path, tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "a"}]
    names = ["duel", "count"] * 2
    data = [{"prompt": chat, "environment": name} for name in names]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, data)))
    both = f"environment={{duel: {GAMES}:Duel, count: {GAMES}:Count}}"
    kwargs = "environment.kwargs={count: {turns: 2}}"
    files = f"data.train_files={tmp_path}/rows.jsonl"
    play(tiny_dir, tmp_path / "run", *FOUR_SAMPLES, files, both, kwargs, "data.train_batch_size=4")
    samples = rows(tmp_path / "run")
    assert len(samples) == 16
    players = [row["uid"].partition(":")[2] for row in samples]
    assert sorted(players) == [""] * 8 + ["black"] * 4 + ["white"] * 4
    for row, player in zip(samples, players, strict=True):
        if not player:
            rewards = [turn["reward"] for turn in row["turns"] if turn["role"] == "assistant"]
            assert rewards == [0.5, 2.0]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("actor_rollout_ref.rollout.n=3",), "n=3 must be a multiple of 2.*such as 4"),
        (("actor_rollout_ref.rollout.n=2",), "n=2 must be a multiple of 2 above 2, such as 4"),
        ((f"environment={{a: {GAMES}:Count}}",), "no column 'environment' that names one of a"),
    ],
)
def test_impossible_settings_of_players_and_columns_are_rejected(
    more: tuple[str, ...], words: str, tiny_dir: Path, tmp_path: Path
) -> None:
    duel = () if more[0].startswith("environment") else (DUEL,)
    with pytest.raises(ConfigError, match=f"(?s){words}"):
        play(tiny_dir, tmp_path / "run", *FOUR_SAMPLES, *duel, *more)


def test_the_baseline_of_a_player_is_its_greedy_score(tiny_dir: Path, tmp_path: Path) -> None:
    """The two players have different rewards."""
    folder = tmp_path / "run"
    more = "trainer.batch_steps_to_keep=2", "trainer.save_freq=1"
    play(tiny_dir, folder, *FOUR_SAMPLES, *more, DUEL, "algorithm.adv_estimator=remax")
    batch = DataProto.load_from_disk(batch_file(folder, 1, "update"))
    baselines: dict[str, set[float]] = {}
    uids = batch.non_tensor_batch["uid"]
    for uid, baseline in zip(uids, batch.padded("reward_baselines").tolist(), strict=True):
        baselines.setdefault(uid, set()).add(baseline)
    assert len(baselines) == 4
    for uid, of_player in baselines.items():
        (baseline,) = of_player
        assert baseline > 0.5 if uid.endswith(":white") else baseline < 0.5


def test_groups_of_players_are_filtered_by_prompts() -> None:
    uids = ["0-0:a", "0-0:b"] * 2 + ["1-0:a", "1-0:b"] * 2 + ["2-0"] * 4
    scores = torch.tensor([1.0, 0, 1, 2, 3, 4, 3, 4, 5, 5, 5, 5])
    samples = DataProto.from_dict({"token_level_scores": scores[:, None]}, {"uid": uids})
    config = FilterGroupsConfig(enable=True, max_num_gen_batches=1, metric="seq_reward")
    batch, _, metrics = collect_groups(lambda _: (samples, {}), 1, config)
    assert list(batch.non_tensor_batch["uid"]) == uids[:4]
    assert metrics["dynamic_sampling/num_groups_sampled"] == 3
    batch, _, _ = collect_groups(lambda _: (samples, {}), 2, config)
    assert list(batch.non_tensor_batch["uid"]) == uids[:8]


def test_players_of_a_trajectory_go_to_one_rank() -> None:
    prompts = DataProto.from_dict(
        {"input_ids": torch.zeros(3, 1)},
        {"uid": ["0-0", "1-0", "2-0"], PLAYERS: [["a", "b"], [], ["a", "b"]]},
    )
    repeated = repeat_prompts(prompts, 4)
    uids = list(repeated.non_tensor_batch["uid"])
    assert uids == ["0-0:a", "0-0:b"] * 2 + ["1-0"] * 4 + ["2-0:a", "2-0:b"] * 2
    assert repeated.padded("sample_index").tolist() == [0, 0, 1, 1, 0, 1, 2, 3, 0, 0, 1, 1]
    for ranks in range(1, 13):
        group: Any = SimpleNamespace(
            generate_sequences=SimpleNamespace(collecting_ranks=lambda ranks=ranks: range(ranks))
        )
        shares = RolloutClient(group)._shares(range(12), repeated)
        assert [row for share in shares.values() for row in share] == [*range(12)]
        for share in shares.values():
            assert re.fullmatch("(ab|x)*", "".join(uids[row][4:] or "x" for row in share))
