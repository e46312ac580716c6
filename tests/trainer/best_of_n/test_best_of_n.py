"""Runs of best-of-n: their output file, its readers, and resumes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.integration.runs import lines, overrides_on_rows, write_jsonl
from trainer.best_of_n.recipe import BEST_OF_N
from trainer.best_of_n.step import BestOfNTrainer
from trainer.config.compose import load_config
from trainer.data.files import rows_of_files
from trainer.data.lm_rows import LMRow, read_lm_rows
from trainer.data.pairs import read_pairs
from trainer.data.prompts import load_tokenizer
from trainer.launch import run
from trainer.ppo.recipe import PPO
from trainer.rollouts.rollouts import Rollouts
from trainer.sft.recipe import SFT
from verl_like.config_key import changed
from verl_like.errors import BatchError, CheckpointError, ConfigError


def settings(tiny_dir: Path, folder: Path, *more: str) -> list[str]:
    return [
        f"data.train_files={tiny_dir}/val.parquet",
        f"actor_rollout_ref.model.path={tiny_dir}/model",
        f"trainer.default_local_dir={folder}",
        "data.train_batch_size=12",
        "data.max_prompt_length=16",
        "data.max_response_length=8",
        "actor_rollout_ref.rollout.n=4",
        "trainer.backend=local",
        "trainer.logger=[]",
        *more,
    ]


def prompts(tiny_dir: Path, count: int) -> list[dict[str, Any]]:
    rows = rows_of_files([str(tiny_dir / "val.parquet")], "data.train_files")
    return [row for _, row in list(rows)[:count]]


def selected(tiny_dir: Path, folder: Path, *more: str) -> str:
    run(load_config(settings(tiny_dir, folder, *more), BEST_OF_N))
    return (folder / "selected.jsonl").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def whole(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of 32 prompts in batches of 12: the last has 8."""
    folder = tmp_path_factory.mktemp("whole")
    selected(tiny_dir, folder)
    return folder


def rows_in(folder: Path) -> list[dict[str, Any]]:
    return lines(folder, "selected.jsonl")


def test_every_prompt_has_its_best_sample(whole: Path) -> None:
    best: dict[str, dict[str, Any]] = {}
    for step in (1, 2, 3):
        for sample in lines(whole, f"rollouts/{step}.jsonl"):
            if sample["output"].strip():
                old = best.setdefault(sample["uid"], sample)
                best[sample["uid"]] = max(old, sample, key=lambda row: row["score"])

    rows = rows_in(whole)
    assert [row["uid"] for row in rows] == [f"{number}-0" for number in range(32)]
    for row in rows:
        assert row["score"] == best[row["uid"]]["score"]
        assert row["response"] == best[row["uid"]]["output"]
    metrics = lines(whole)
    assert [line["selection/num_prompts"] for line in metrics] == [12, 12, 8]
    assert all(line["score/best"] > line["score/mean"] for line in metrics)


def test_sft_reads_the_file(whole: Path, tiny_dir: Path) -> None:
    tokenizer = load_tokenizer(str(tiny_dir / "model"))
    files = str(whole / "selected.jsonl")
    rows = read_lm_rows("data.train_files", files, tokenizer, max_length=64)
    assert len(rows) == 32
    for row, written in zip(rows, rows_in(whole), strict=True):
        end = tokenizer.eos_token if written["finish_reason"] == "stop" else ""
        assert tokenizer.decode(row.ids[row.in_loss]) == written["response"] + end
    assert {row["finish_reason"] for row in rows_in(whole)} == {"stop", "length"}


def test_only_the_sampled_response_of_a_dialogue_is_in_the_loss(
    tiny_dir: Path, tmp_path: Path
) -> None:
    tokenizer = load_tokenizer(str(tiny_dir / "model"))
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "bb"},
        {"role": "user", "content": "c"},
    ]
    dialogues = [row | {"prompt": turns + row["prompt"]} for row in prompts(tiny_dir, 12)]
    file = write_jsonl(tmp_path / "dialogues.jsonl", dialogues)
    more = (f"data.train_files={file}", "data.max_prompt_length=64")

    def check(side: LMRow, response: str, finish_reason: str) -> None:
        end = tokenizer.eos_token if finish_reason == "stop" else ""
        assert tokenizer.decode(side.ids[side.in_loss]) == response + end

    selected(tiny_dir, tmp_path / "sft", *more)
    rows = rows_in(tmp_path / "sft")
    files = str(tmp_path / "sft" / "selected.jsonl")
    for side, row in zip(read_lm_rows("f", files, tokenizer, 128), rows, strict=True):
        assert row["prompt"][:3] == turns
        check(side, row["response"], row["finish_reason"])

    selected(tiny_dir, tmp_path / "pairs", *more, "selection.format=pairs")
    rows = rows_in(tmp_path / "pairs")
    files = str(tmp_path / "pairs" / "selected.jsonl")
    for pair, row in zip(read_pairs("f", files, tokenizer, 128), rows, strict=True):
        check(pair.chosen, row["chosen"], row["chosen_finish_reason"])
        check(pair.rejected, row["rejected"], row["rejected_finish_reason"])


def test_the_next_step_generates_while_rewards_are_computed(
    tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = []
    launch, draw = Rollouts.launch_rewards, BestOfNTrainer.sample_prompts

    def record_launch(rollouts: Rollouts, batch: Any) -> Any:
        events.append(f"launch {rollouts.run.step}")
        scores = launch(rollouts, batch)
        get = scores.get
        monkeypatch.setattr(scores, "get", lambda: (events.append("get"), get())[1])
        return scores

    def record_draw(trainer: BestOfNTrainer, step: int) -> Any:
        events.append(f"draw {step}")
        return draw(trainer, step)

    monkeypatch.setattr(Rollouts, "launch_rewards", record_launch)
    monkeypatch.setattr(BestOfNTrainer, "sample_prompts", record_draw)
    selected(tiny_dir, tmp_path, "data.train_batch_size=16")
    first = ["draw 1", "launch 1", "draw 2", "get"]
    assert events == [*first, "launch 2", "get"]


def test_the_batch_size_does_not_change_the_file(
    whole: Path, tiny_dir: Path, tmp_path: Path
) -> None:
    text = selected(tiny_dir, tmp_path, "data.train_batch_size=32")
    assert text == (whole / "selected.jsonl").read_text(encoding="utf-8")


@pytest.mark.slow
def test_sft_on_the_best_responses_raises_the_score(tiny_dir: Path, tmp_path: Path) -> None:
    best, tuned = tmp_path / "best.jsonl", tmp_path / "tuned"
    more = (f"data.train_files={tiny_dir}/train.parquet", "data.train_batch_size=300")
    selection = (
        "actor_rollout_ref.rollout.n=16",
        f"selection.file={best}",
        "selection.min_score=0.2",
        "selection.truncated=drop",
    )
    run(load_config(settings(tiny_dir, tmp_path / "draw", *more, *selection), BEST_OF_N))
    learning = ("data.train_batch_size=16", "data.max_length=64", "optim.lr=3e-3")
    sft = overrides_on_rows(tiny_dir, {"train": best}, tuned, *learning, "trainer.total_epochs=4")
    run(load_config(sft, SFT))
    again = settings(tiny_dir, tmp_path / "again", f"actor_rollout_ref.model.path={tuned}/model")
    run(load_config(again, BEST_OF_N))
    before = lines(tmp_path / "draw")[0]["score/mean"]
    after = [line["score/mean"] for line in lines(tmp_path / "again")]
    assert min(after) > 3 * before, (before, after)


def test_a_killed_run_resumes_to_the_same_file(whole: Path, tiny_dir: Path, tmp_path: Path) -> None:
    class Killed(BestOfNTrainer):
        def step(self) -> Any:
            metrics = super().step()
            if self.global_step == 2:  # its rows are written but not committed
                raise KeyboardInterrupt
            return metrics

    config = load_config(settings(tiny_dir, tmp_path), BEST_OF_N)
    with pytest.raises(KeyboardInterrupt):
        run(config, Killed)
    assert not (tmp_path / "selected.jsonl").exists()
    text = selected(tiny_dir, tmp_path)
    assert text == (whole / "selected.jsonl").read_text(encoding="utf-8")
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3]

    (tmp_path / "selected.jsonl").unlink()  # a run that was killed before its last line
    assert selected(tiny_dir, tmp_path) == text
    few = write_jsonl(tmp_path / "few.jsonl", prompts(tiny_dir, 20))
    config = changed(config, {"data.train_files": str(few)})
    config = changed(config, {"trainer.resume_mode": "resume_path"})
    config = changed(config, {"trainer.resume_from_path": str(tmp_path / "global_step_3")})
    with pytest.raises(CheckpointError, match="num_prompts: saved 32, now 20"):
        run(config)
    (tmp_path / "selected" / "1.jsonl").unlink()
    (tmp_path / "selected.jsonl").unlink()
    with pytest.raises(CheckpointError, match="the rows of step 1 are not in"):
        selected(tiny_dir, tmp_path)


def test_a_reward_model_chooses_pairs(tiny_dir: Path, tmp_path: Path, classifier: Path) -> None:
    judged = ("reward.model.enable=true", f"reward.model.path={classifier}")
    pairs = (*judged, "selection.format=pairs", "data.train_batch_size=32")
    path = str(tmp_path / "rows.parquet")
    placed = (f"selection.file={path}", "placement=split", "trainer.n_gpus_per_node=2")
    run(load_config(settings(tiny_dir, tmp_path / "run", *pairs, *placed), BEST_OF_N))
    rows = [row for _, row in rows_of_files([path], "data.train_files")]
    assert all(row["chosen_score"] > row["rejected_score"] for row in rows)
    assert {"function_score", "model_score"} <= rows[0]["chosen_rewards"].keys()

    tokenizer = load_tokenizer(str(tiny_dir / "model"))
    assert len(read_pairs("data.train_files", path, tokenizer, max_length=64)) == len(rows)


def test_an_unwritable_file_is_rejected(tiny_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    file = f"selection.file={tmp_path}/taken/rows.jsonl"
    with pytest.raises(ConfigError, match="cannot write a file in .*taken is not a folder"):
        selected(tiny_dir, tmp_path / "run", file)


def test_the_plan_shows_how_many_samples_a_step_selects_from(
    tiny_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ("trainer.dry_run=true", "selection.format=pairs", "selection.min_score=0.5")
    run(load_config(settings(tiny_dir, tmp_path, *more), BEST_OF_N))
    shown = " ".join(capsys.readouterr().out.split())
    assert "generates 48 samples (12 prompts, 4 each) and keeps the best and the worst" in shown
    assert "from a score of 0.5 on" in shown
    assert not (tmp_path / "rollouts").exists()


def test_a_minimum_score_that_no_sample_reaches_raises(tiny_dir: Path, tmp_path: Path) -> None:
    more = ("selection.min_score=2", "trainer.total_training_steps=1")
    with pytest.raises(BatchError, match="no sample was selected.*or lower selection.min_score"):
        selected(tiny_dir, tmp_path, *more)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("selection.format=pairs selection.top_k=2", "top_k .*: a pair is one of each prompt"),
        ("actor_rollout_ref.model.lora_rank=4", "lora_rank .*: this recipe trains nothing"),
        ("data.val_files=x", "val_files .*: this recipe has no validations"),
        ("trainer.total_epochs=2", "total_epochs .*: this recipe takes every prompt once"),
    ],
)
def test_a_key_of_training_has_no_effect(
    tiny_dir: Path, tmp_path: Path, more: str, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    load_config(settings(tiny_dir, tmp_path, *more.split()), BEST_OF_N)
    assert re.search(words, caplog.text)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (
            "selection.top_k=5",
            "rollout.n=4 samples per prompt are too few, because selection.top_k=5 keeps more",
        ),
        ("selection.format=pairs actor_rollout_ref.rollout.n=1", "a pair is made of two"),
        ("selection.file=rows.csv", "it must end in .parquet or .jsonl"),
        ("actor_rollout_ref.rollout.do_sample=false", "would be the same greedy response"),
        ("actor_rollout_ref.actor.optim.lr=1", "there is no key 'actor_rollout_ref.actor.optim.lr"),
        ("reward.list=[{name:a,kind:function,normalize:true}]", "must not depend on the batch"),
    ],
)
def test_settings_that_cannot_work_are_rejected(
    tiny_dir: Path, tmp_path: Path, more: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(settings(tiny_dir, tmp_path, *more.split()), BEST_OF_N)


def test_keys_shared_with_ppo_have_the_same_type() -> None:
    from trainer.config.keys import leaf_keys

    kinds = {key.name: key.kind for key in leaf_keys(PPO.schema)}
    shared = [key for key in leaf_keys(BEST_OF_N.schema) if not key.name.startswith("selection.")]
    assert [key.name for key in shared if kinds.get(key.name) != key.kind] == []
