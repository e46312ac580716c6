"""Asynchronous runs: staleness 0 equals the synchronous run, and no sample is lost."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.integration.runs import FEW_ROWS, POLICY_ALONE, calls, lines, numbers, overrides
from tests.trainer.async_training.rigged_workers import SEND_S
from tests.trainer.async_training.uids import uids_of
from trainer import load_config, run
from trainer.async_training import checks
from trainer.async_training.recipe import ASYNC
from trainer.async_training.step import AsyncTrainer
from trainer.hooks import Hooks
from verl_like.errors import CheckpointError, ConfigError

LOCAL = "trainer.backend=local"
APART = ("async_training.topology=2m2t", "async_training.sample_routes=[[0,0],[1,1]]")
"""Trainer ranks that have generators of their own."""
BY_PROMPTS = "trainer.total_training_steps=null"
GENERATORS = "async_training.generator_settings"
ENDS_AT_13 = (BY_PROMPTS, "data.total_prompts=13", "actor_rollout_ref.actor.ppo_mini_batch_size=1")


def run_async(tiny: Path, folder: Path, *more: str) -> Path:
    """Run asynchronous training, by default for three steps; return its folder."""
    run(load_config(overrides(tiny, folder, LOCAL, *more), ASYNC))
    return folder


def shared_numbers(folder: Path) -> list[dict[str, float]]:
    """Return every metric that PPO has too and that does not depend on the clock.

    Without the version's number: PPO gives one to the averaged weights of a validation, too.
    """
    others = ("async/", "training/weight_version")
    return [
        {name: value for name, value in line.items() if not name.startswith(others)}
        for line in numbers(folder)
    ]


def ledger_of(folder: Path) -> dict[str, Any]:
    ledger: dict[str, Any] = json.loads((folder / "async.json").read_text())["ledger"]
    return ledger


VALIDATED = ("trainer.test_freq=1", "actor_rollout_ref.actor.ema_decay=0.5")
FILTERED_GROUPS = "algorithm.filter_groups"
TWO_STEPS = "trainer.total_training_steps=2"
TWO_SYNCHRONOUS = ("async_training.generators=2", "async_training.max_staleness=0")
"""Two generators without staleness."""


def test_staleness_0_equals_the_synchronous_run(
    tiny_dir: Path, tmp_path: Path, plain: Path
) -> None:
    """Also where a generator returns partial responses, and weights are sent as differences."""
    changes = "actor_rollout_ref.rollout.weight_sync=changed"
    partial = f"{GENERATORS}.0={{max_tokens_per_call: 3}}"
    folder = run_async(tiny_dir, tmp_path, *TWO_SYNCHRONOUS, changes, partial)
    assert shared_numbers(folder) == shared_numbers(plain)
    takes = Counter(call["cat"] for call in calls(folder, "collect"))
    assert takes["rollout"] > takes["rollout_1"] > 0


@pytest.mark.long
def test_two_generators_validate_like_the_synchronous_run(
    tiny_dir: Path, tmp_path: Path, few_validated: str
) -> None:
    engine = "actor_rollout_ref.rollout.name=hf"
    more = (*POLICY_ALONE, *FEW_ROWS, TWO_STEPS, *VALIDATED, few_validated, engine)
    run(load_config(overrides(tiny_dir, tmp_path / "plain", LOCAL, *more)))
    folder = run_async(tiny_dir, tmp_path / "async", *more, *TWO_SYNCHRONOUS)
    assert shared_numbers(folder) == shared_numbers(tmp_path / "plain")
    validated = [call for call in calls(folder, "submit") if call["args"]["stage"] == "testing"]
    roles = Counter(call["cat"] for call in validated)
    assert roles["rollout"] == roles["rollout_1"] > 0


@pytest.mark.long
def test_dynamic_sampling_drops_the_same_groups(tiny_dir: Path, tmp_path: Path) -> None:
    more = ("algorithm.filter_groups.enable=true", *POLICY_ALONE, TWO_STEPS)
    run(load_config(overrides(tiny_dir, tmp_path / "plain", LOCAL, *more)))
    folder = run_async(tiny_dir, tmp_path / "async", *more, *TWO_SYNCHRONOUS)
    assert shared_numbers(folder) == shared_numbers(tmp_path / "plain")

    num_drawn = sum(line["dynamic_sampling/num_groups_sampled"] for line in lines(folder))
    assert num_drawn > 2 * 8
    dropped = sum(
        (Counter(row["dropped"]) for row in ledger_of(folder)["generators"].values()), Counter()
    )
    assert dropped == {FILTERED_GROUPS: 2 * (num_drawn - 2 * 8)}


@pytest.mark.long
@pytest.mark.parametrize(
    "axes",
    [
        (),
        pytest.param(
            ("async_training.trainers=2", "actor_rollout_ref.actor.parallel.pp=2"),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["one trainer", "stages"],
)
def test_adapters_train_like_in_the_synchronous_run(
    tiny_dir: Path, tmp_path: Path, axes: tuple[str, ...]
) -> None:
    more = ("actor_rollout_ref.model.lora_rank=2", TWO_STEPS, *POLICY_ALONE, *FEW_ROWS)
    run(load_config(overrides(tiny_dir, tmp_path / "plain", LOCAL, *more)))
    logged = ("actor_rollout_ref.rollout.weight_sync=changed", "async_training.log_syncs=true")
    folder = run_async(tiny_dir, tmp_path / "async", *more, *logged, *TWO_SYNCHRONOUS, *axes)
    for line, expected in zip(lines(folder), lines(tmp_path / "plain"), strict=True):
        for name in ("critic/score/mean", "actor/pg_loss", "actor/grad_norm"):
            # generators generate with merged weights, which round differently
            assert line[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-7)
    for generator in (0, 1):
        syncs = lines(folder, "syncs.jsonl")
        sent = [sync["bytes"] for sync in syncs if sync["generator"] == generator]
        assert len(sent) >= 2
        assert 0 < max(sent[1:]) < sent[0] / 10, "only the adapters"


def test_generators_run_ahead_and_files_name_the_generator_of_each_sample(
    tiny_dir: Path, tmp_path: Path
) -> None:
    """Two epochs of two steps, with a staleness of one version, by two generators."""
    more = (
        "async_training.generators=2",
        "async_training.max_staleness=1",
        BY_PROMPTS,
        "trainer.total_epochs=2",
        "data.train_batch_size=32",
        "actor_rollout_ref.actor.ppo_mini_batch_size=32",
        "data.max_response_length=2",
        *POLICY_ALONE,
    )
    ahead = run_async(tiny_dir, tmp_path, *more)
    oldest = [line["async/staleness/max"] for line in lines(ahead)]
    assert (oldest[0], max(oldest)) == (0, 1)
    generators: Counter[str] = Counter()
    for line in lines(ahead):
        rows = lines(ahead, f"rollouts/{line['step']}.jsonl")
        ages = [row["trained_by_version"] - row["weight_version"] for row in rows]
        assert max(ages) == line["async/staleness/max"]
        assert sum(ages) / len(ages) == pytest.approx(line["async/staleness/mean"])
        generators.update(str(row["generator"]) for row in rows)
        assert {row["trainer"] for row in rows} == {0}
    ledger = ledger_of(ahead)
    for key in ("made", "trained"):
        assert generators == {name: row[key] for name, row in ledger["generators"].items()}
    assert ledger["trainers"] == {"0": 4 * 64}
    assert sum(ledger["staleness"].values()) == 4 * 64

    steps = uids_of(ahead, len(lines(ahead)))
    for epoch, first in enumerate((0, 2)):
        two_of_each = [f"{row}-{epoch}" for row in (*range(64), *range(64))]
        assert sorted(sum(steps[first : first + 2], [])) == sorted(two_of_each)

    pids = {event["args"]["pid"] for event in calls(ahead, "submit")}
    assert len(pids) == 2
    assert not pids & {event["args"]["pid"] for event in calls(ahead, "update_actor")}


def test_a_batch_is_trained_on_as_often_as_there_are_epochs(tiny_dir: Path, tmp_path: Path) -> None:
    rounds = ("async_training.update_steps=2", "async_training.train_epochs=2")
    more = (*rounds, "trainer.total_training_steps=8", *POLICY_ALONE, *FEW_ROWS)
    folder = run_async(tiny_dir, tmp_path, *more)
    assert ledger_of(folder)["generators"]["0"]["made"] == 4 * 8
    assert [line["training/weight_version"] for line in lines(folder)[3::4]] == [2, 3]
    uids = [{row["uid"] for row in lines(folder, f"rollouts/{step}.jsonl")} for step in range(1, 9)]
    assert uids[2:4] in (uids[0:2], uids[1::-1])
    assert not uids[0] & uids[4]

    of_round = [int(line["async/batch_index"]) for line in lines(folder)]
    assert of_round[:2] == of_round[4:6] == [0, 1]
    assert uids[2:4] == [uids[place] for place in of_round[2:4]]
    assert uids[6:] == [uids[4 + place] for place in of_round[6:]]
    for line in lines(folder):
        is_fresh = line["async/train_epoch"] == 0
        drawn = line["response_length/mean"] * 8 if is_fresh else 0
        assert line["async/sampled_tokens"] == pytest.approx(drawn)


def test_old_samples_are_corrected_unless_the_user_decides(tiny_dir: Path, tmp_path: Path) -> None:
    def correction(*more: str) -> tuple[str | None, bool]:
        config = load_config(overrides(tiny_dir, tmp_path, LOCAL, *more), ASYNC)
        settings = config.algorithm.rollout_correction
        return settings.rollout_is, settings.bypass_mode

    assert correction("async_training.max_staleness=1") == ("token", False)
    assert correction("async_training.max_staleness=0") == (None, False)
    rounded = f"{GENERATORS}.1={{quantization: int8}}"
    assert correction(*TWO_SYNCHRONOUS, rounded)[0] == "token"
    assert correction("correction=disabled") == (None, False)
    assert correction("correction=decoupled_seq_is") == ("sequence", False)
    assert correction("algorithm.rollout_correction.rollout_is=null") == (None, False)


def test_generator_settings_have_the_types_of_rollout_keys(tiny_dir: Path, tmp_path: Path) -> None:
    for setting in (
        "={0: {kv_cache_gib: 1, max_num_seqs: 8}}",
        ".0={kv_cache_gib: '1', dtype: null}",
    ):
        settings = overrides(tiny_dir, tmp_path, LOCAL, f"{GENERATORS}{setting}")
        config = load_config(settings, ASYNC)
        rollout = config.for_role("rollout").actor_rollout_ref.rollout
        assert (rollout.kv_cache_gib, type(rollout.kv_cache_gib)) == (1.0, float)
        assert rollout.max_num_seqs == (8 if "8" in setting else 256)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["async_training.max_inflight_samples=4"], "=4 is less than a batch of 16"),
        (["async_training.prompts_per_call=3"], "does not divide the 8 prompts.*nearest.*2 and 4"),
        (["algorithm.adv_estimator=remax"], "remax compares samples with a greedy response"),
        (["role_mapping.rollout=trainer_pool"], "is also the pool of .*, but a generator"),
        (["async_training.on_buffer_full=evict_oldest"], "Set async_training.max_inflight_samples"),
        (
            [f"{GENERATORS}.4={{name: hf}}"],
            "settings.4: generators are numbered from 0, and this run has 1",
        ),
        ([f"{GENERATORS}.0={{weight_sync: changed}}"], f"no key '{GENERATORS}.0.weight_sync'"),
        ([f"{GENERATORS}.x={{name: hf}}"], "has the key 'x'. Use generators' numbers"),
        (
            ["trainer.cls=trainer.ppo.PPOTrainer"],
            "trainer.ppo.PPOTrainer is not a subclass of trainer.async_training.step.AsyncTrainer",
        ),
        ([f"{GENERATORS}={{0: {{max_num_seqs: 0}}}}"], "0: .*max_num_seqs=0: it must be"),
        (
            [
                "async_training.weight_update=immediate",
                "actor_rollout_ref.rollout.name=builtins.object",
            ],
            "rollout's engine builtins.object cannot load weights during a generation",
        ),
        (
            ["async_training.train_epochs=2", "trainer.save_freq=3"],
            "Set trainer.save_freq to a multiple of 2",
        ),
        (
            [*APART, "algorithm.filter_groups.enable=true"],
            r"filter_groups.enable=true selects .*routes=\[\[0,0\],\[0,1\],\[1,0\],\[1,1\]\]",
        ),
        ([*APART, "algorithm.use_pf_ppo=true"], "use_pf_ppo=true selects a batch's rows from"),
        (
            [*APART, *ENDS_AT_13],
            "=13 ends in a batch of 5 prompts, .* 2 trainer ranks.*values that are: 12 and 14",
        ),
        (
            [*APART, "data.train_batch_size=7", "actor_rollout_ref.actor.ppo_mini_batch_size=7"],
            "=7 prompts is not divisible by the 2 trainer ranks.*that are: 6 and 8",
        ),
        (
            ["async_training.sampler=ready_first", "data.total_prompts=12", BY_PROMPTS],
            "=12 is not a multiple of the batch of 8 prompts. Only async_training.sampler=in_order",
        ),
        (
            ["async_training.generators=2", "role_mapping.rollout_1=generator_0_pool"],
            "generator_0_pool is also the pool of rollout_1.* Give each its own",
        ),
        (
            ["async_training.sampler=version_window", "async_training.drop_older_than=3"],
            "drop_older_than=3 has no effect above async_training.max_staleness=1",
        ),
    ],
)
def test_settings_that_cannot_work_are_rejected(
    tiny_dir: Path, tmp_path: Path, settings: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(overrides(tiny_dir, tmp_path, LOCAL, *settings), ASYNC)


@pytest.mark.parametrize(
    "key",
    [
        f"{GENERATORS}.0.tensor_model_parallel_size",
        "actor_rollout_ref.rollout.tensor_model_parallel_size",
    ],
)
def test_a_key_that_no_generator_reads_is_a_notice(
    key: str, tiny_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load_config(overrides(tiny_dir, tmp_path, LOCAL, f"{key}=2"), ASYNC)
    assert f"note: {key} has no effect: " in caplog.text


@pytest.mark.parametrize(("settings", "devices"), [((), 3), (("trainer.n_gpus_per_node=5",), 5)])
def test_a_node_has_the_devices_of_its_pools_unless_they_are_set(
    settings: tuple[str, ...], devices: int, tiny_dir: Path, tmp_path: Path
) -> None:
    two = ("async_training.generators=2", "trainer.device=cuda", *settings)
    config = load_config(overrides(tiny_dir, tmp_path, *two), ASYNC)
    assert config.trainer.n_gpus_per_node == devices


def test_a_run_does_not_resume_within_a_round(
    tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = ("async_training.train_epochs=2", "async_training.update_steps=2")
    config = load_config(overrides(tiny_dir, tmp_path, LOCAL, *rounds), ASYNC)
    start = SimpleNamespace(start=tmp_path / "global_step_6", start_step=6, finished_message="")
    monkeypatch.setattr(checks, "ResumePoint", lambda config: start)
    with pytest.raises(
        CheckpointError, match="global_step_6 was saved in the middle of a round of 4 steps"
    ):
        AsyncTrainer.prepare(config, ExitStack())
    start.finished_message = "nothing is left to do"
    checks.check_start(config)
    start.start_step = 8
    checks.check_start(config)


def test_a_dry_run_rejects_an_engine_too_large_for_its_pool(tiny_dir: Path, tmp_path: Path) -> None:
    wide = f"{GENERATORS}.1={{name: vllm, tensor_model_parallel_size: 2}}"
    settings = ("async_training.generators=2", wide, "trainer.dry_run=true")
    words = "generator_settings.1: .*size=2 does not divide the 1 process of rollout_1's"
    with pytest.raises(ConfigError, match=words):
        run(load_config(overrides(tiny_dir, tmp_path, LOCAL, *settings), ASYNC))


NUM_SAMPLES = 2 * 4 * 2


def test_the_formulas_of_colossalchat_train_on_all_samples(
    tiny_dir: Path, classifier: Path, tmp_path: Path
) -> None:
    """Two steps of one generator, one trainer and a reward model on the trainer's pool."""
    model = f"reward.list=[{{name: model, kind: model, path: '{classifier}'}}]"
    settings = ("algorithm=coati_legacy", model, TWO_STEPS, *FEW_ROWS)
    legacy = run_async(tiny_dir, tmp_path, *settings)
    ledger = ledger_of(legacy)
    assert ledger["generators"]["0"]["made"] == ledger["generators"]["0"]["trained"] == NUM_SAMPLES
    assert ledger["trainers"] == {"0": NUM_SAMPLES}
    assert min(ledger["versions"]) == "1", "the generators have weights before the first prompt"
    for line in lines(legacy):
        assert line["actor/grad_norm"] > 0
        assert line["critic/grad_norm"] > 0
        for end in ("min", "max"):  # every token's return is the whole reward of its response
            rewards = line[f"critic/rewards/{end}"]
            assert line[f"critic/returns/{end}"] == pytest.approx(rewards, abs=1e-5)
        assert abs(line["critic/advantages/mean"]) > 1e-4, "nothing whitens them"

    scored = calls(legacy, "compute_rm_score")
    assert len(scored) == 2
    trainers = {event["args"]["pid"] for event in calls(legacy, "update_actor")}
    assert {event["args"]["pid"] for event in scored} == trainers
    scores = [row["score"] for step in (1, 2) for row in lines(legacy, f"rollouts/{step}.jsonl")]
    assert len(scores) == NUM_SAMPLES
    assert len(set(scores)) > NUM_SAMPLES / 2, "a model of random weights, not a rule of 0 and 1"


HOOKS = [name for name in vars(Hooks) if name.startswith("on_")]


class Recorder:
    """Records every hook with its step."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, str]] = []
        for hook in HOOKS:
            setattr(self, hook, lambda trainer, *_, hook=hook: self.note(trainer, hook))

    def note(self, trainer: Any, hook: str) -> None:
        self.seen.append((trainer.global_step, hook.removeprefix("on_")))


def test_hooks_are_called_in_order(tiny_dir: Path, tmp_path: Path, few_validated: str) -> None:
    settings = (
        "trainer.backend=local",
        "trainer.total_training_steps=2",
        "trainer.save_freq=2",
        few_validated,
        "trainer.test_freq=2",
        "trainer.val_before_train=false",
        *(*POLICY_ALONE, *FEW_ROWS),
    )
    recorder = Recorder()
    run(load_config(overrides(tiny_dir, tmp_path, *settings), ASYNC), callbacks=[recorder])
    step = ["step_begin", "sample_begin", "generated", "sample_end", "update"]
    hooks = [seen for seen in recorder.seen if not seen[1].startswith(("stage_", "filter"))]
    assert hooks == [
        (0, "init_end"),
        (0, "train_begin"),
        *[(1, name) for name in [*step, "step_end"]],
        *[(2, name) for name in [*step, "validate_begin", "validate_end", "step_end", "save_end"]],
        (2, "train_end"),
    ]


def intervals(folder: Path, method: str) -> list[tuple[float, float]]:
    """Return start and end in seconds of every call."""
    return [
        (event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6) for event in calls(folder, method)
    ]


def test_slow_sends_and_slow_updates_overlap(tiny_dir: Path, tmp_path: Path) -> None:
    actor = "role_workers.actor=tests.trainer.async_training.rigged_workers.SlowActor"
    more = (
        "data.train_batch_size=4",
        "trainer.total_training_steps=5",
        "data.max_response_length=2",
        *POLICY_ALONE,
    )
    folder = run_async(tiny_dir, tmp_path, actor, "async_training.max_staleness=1", *more)
    sends = intervals(folder, "deliver_weights")
    scores, updates = intervals(folder, "compute_log_prob"), intervals(folder, "update_actor")
    work = [(score[0], update[1]) for score, update in zip(scores, updates, strict=True)]
    assert len(work) == 5
    shared = sum(
        max(min(send[1], busy[1]) - max(send[0], busy[0]), 0.0) for send in sends for busy in work
    )
    # of the sends except the first, during which nothing is trained, and the last
    assert shared > 0.7 * 3 * SEND_S
