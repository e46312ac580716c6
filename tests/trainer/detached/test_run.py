"""Detached runs on the tiny model: staleness 0 is the synchronous run, and no sample is lost."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.integration.runs import FEW_ROWS, POLICY_ALONE, calls, lines, numbers, overrides
from tests.trainer.detached.uids import uids_of
from trainer import load_config, run
from trainer.detached import checks
from trainer.detached.recipe import DETACHED
from trainer.detached.step import DetachedTrainer
from verl_like.errors import CheckpointError, ConfigError, RolloutError

LOCAL = "trainer.backend=local"
APART = ("detached.topology=2m2t", "detached.edges=[[0,0],[1,1]]")
"""Trainer ranks that have makers of their own."""
BY_PROMPTS = "trainer.total_training_steps=null"
ENDS_AT_12 = (BY_PROMPTS, "data.total_prompts=12")
ENDS_AT_13 = (BY_PROMPTS, "data.total_prompts=13", "actor_rollout_ref.actor.ppo_mini_batch_size=1")


def detached(tiny: Path, folder: Path, *more: str) -> Path:
    """The folder of a detached run, of three steps unless it is told."""
    run(load_config(overrides(tiny, folder, LOCAL, *more), DETACHED))
    return folder


def shared_numbers(folder: Path) -> list[dict[str, float]]:
    """Every number of a run that the clock does not decide and that PPO has.

    Without the version's number: PPO gives one to the averaged weights of a validation, too.
    """
    own = ("detached/", "training/weights_changed_share", "training/weight_version")
    return [
        {name: value for name, value in line.items() if not name.startswith(own)}
        for line in numbers(folder)
    ]


def ledger_of(folder: Path) -> dict[str, Any]:
    ledger: dict[str, Any] = json.loads((folder / "detached.json").read_text())["ledger"]
    return ledger


@pytest.mark.parametrize("makers", ["1m1t", "2m1t"])
def test_staleness_0_is_the_synchronous_run_bit_for_bit(
    tiny_dir: Path, tmp_path: Path, plain: Path, makers: str
) -> None:
    ours = (f"detached.topology={makers}", "detached.max_staleness=0")
    assert shared_numbers(detached(tiny_dir, tmp_path, *ours)) == shared_numbers(plain)


VALIDATED = ("trainer.test_freq=1", "actor_rollout_ref.actor.ema_decay=0.5")
LEFT_OUT = "algorithm.filter_groups"
TWO_STEPS = "trainer.total_training_steps=2"


@pytest.mark.parametrize(
    ("settings", "makers"),
    [
        ((*POLICY_ALONE, *FEW_ROWS, "actor_rollout_ref.rollout.name=hf"), "1m1t"),
        ((*POLICY_ALONE, *VALIDATED, "data.val_files={tiny}/val.parquet"), "1m1t"),
        ((*POLICY_ALONE, *VALIDATED, "data.val_files={tiny}/val.parquet"), "2m1t"),
    ],
    ids=["hf", "validation", "validation_of_two"],
)
def test_staleness_0_is_the_synchronous_run_of_other_settings_bit_for_bit(
    tiny_dir: Path, tmp_path: Path, settings: tuple[str, ...], makers: str
) -> None:
    more = [TWO_STEPS, *(setting.format(tiny=tiny_dir) for setting in settings)]
    run(load_config(overrides(tiny_dir, tmp_path / "plain", LOCAL, *more)))
    ours = (f"detached.topology={makers}", "detached.max_staleness=0")
    folder = detached(tiny_dir, tmp_path / "detached", *more, *ours)
    assert shared_numbers(folder) == shared_numbers(tmp_path / "plain")


def test_dynamic_sampling_leaves_out_groups_as_in_the_synchronous_run_and_the_ledger_has_them(
    tiny_dir: Path, tmp_path: Path
) -> None:
    more = ("algorithm.filter_groups.enable=true", "algorithm.adv_estimator=grpo", TWO_STEPS)
    run(load_config(overrides(tiny_dir, tmp_path / "plain", LOCAL, *more)))
    ours = ("detached.makers=2", "detached.max_staleness=0")
    folder = detached(tiny_dir, tmp_path / "detached", *more, *ours)
    assert shared_numbers(folder) == shared_numbers(tmp_path / "plain")

    num_drawn = sum(line["dynamic_sampling/num_groups_drawn"] for line in lines(folder))
    assert num_drawn > 2 * 8
    dropped = [row["dropped"] for row in ledger_of(folder)["makers"].values()]
    assert {reason for reasons in dropped for reason in reasons} == {LEFT_OUT}
    assert sum(reasons.get(LEFT_OUT, 0) for reasons in dropped) == 2 * (num_drawn - 2 * 8)


def test_responses_made_in_parts_are_those_made_at_once(
    tiny_dir: Path, tmp_path: Path, plain: Path
) -> None:
    parts = {
        "of_all": "actor_rollout_ref.rollout.max_new_tokens_per_call=3",
        "of_one": "detached.maker_settings.0={max_new_tokens_per_call: 3}",
    }
    ours = ("detached.max_staleness=0", TWO_STEPS)
    assert len(calls(plain, "generate_sequences")) == 3
    for name, setting in parts.items():
        folder = detached(tiny_dir, tmp_path / name, *ours, setting)
        assert shared_numbers(folder) == shared_numbers(plain)[:2]
        assert len(calls(folder, "take")) >= 4


def test_weights_that_come_at_once_lose_no_sample(tiny_dir: Path, tmp_path: Path) -> None:
    settings = ("detached.new_weights=at_once", "detached.max_staleness=2", *POLICY_ALONE)
    more = ("data.max_response_length=16", "trainer.total_training_steps=5", "detached.debug=true")
    folder = detached(tiny_dir, tmp_path, *settings, *more)
    assert ledger_of(folder)["trainers"] == {"0": 5 * 16}
    assert max(line["detached/staleness/max"] for line in lines(folder)) <= 2
    syncs = [json.loads(line) for line in (folder / "syncs.jsonl").read_text().splitlines()]
    versions = [sync["version"] for sync in syncs]
    assert versions == sorted(set(versions))


class KillMaker:
    """Ends the process of maker 1 after the first step, as a kernel without memory does."""

    def on_step_end(self, trainer: Any, metrics: dict[str, float]) -> None:
        if trainer.global_step == 1:
            group = trainer.groups["rollout_1"]
            os.kill(group.transport.started[0].pid, signal.SIGKILL)


def test_a_lost_maker_ends_the_run_by_its_name_unless_told_otherwise(
    tiny_dir: Path, tmp_path: Path
) -> None:
    # more steps than it makes until the loss is known
    settings = ("detached.makers=2", "detached.max_staleness=1", "trainer.total_training_steps=50")
    config = load_config(overrides(tiny_dir, tmp_path, LOCAL, *POLICY_ALONE, *settings), DETACHED)
    with pytest.raises(RolloutError, match=r"maker 1 is lost.*SIGKILL.*on_maker_loss=restart"):
        run(config, callbacks=[KillMaker()])


@pytest.mark.parametrize(
    "axes",
    [
        (),
        pytest.param(
            ("detached.trainers=2", "actor_rollout_ref.actor.parallel.pp=2"),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["alone", "stages"],
)
def test_adapters_are_trained_as_in_the_synchronous_run(
    tiny_dir: Path, tmp_path: Path, axes: tuple[str, ...]
) -> None:
    more = ("actor_rollout_ref.model.lora_rank=2", TWO_STEPS, *POLICY_ALONE)
    run(load_config(overrides(tiny_dir, tmp_path / "plain", LOCAL, *more)))
    logged = ("actor_rollout_ref.rollout.sync=changed", "detached.debug=true")
    ours = (*more, *logged, "detached.makers=2", "detached.max_staleness=0", *axes)
    folder = detached(tiny_dir, tmp_path / "detached", *ours)
    for line, expected in zip(lines(folder), lines(tmp_path / "plain"), strict=True):
        for name in ("critic/score/mean", "actor/pg_loss", "actor/grad_norm"):
            # a maker of its own generates with merged weights, which round otherwise
            assert line[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-7)
    for maker in (0, 1):
        sent = [one["bytes"] for one in lines(folder, "syncs.jsonl") if one["maker"] == maker]
        assert len(sent) >= 2
        assert 0 < max(sent[1:]) < sent[0] / 10, "the adapters alone"


@pytest.fixture(scope="module")
def ahead(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two epochs of four steps, of one version's staleness, by two makers."""
    folder = tmp_path_factory.mktemp("detached")
    sizes = ("data.train_batch_size=16", "actor_rollout_ref.actor.ppo_mini_batch_size=16")
    more = ("detached.makers=2", BY_PROMPTS, "trainer.total_epochs=2", *sizes, *POLICY_ALONE)
    return detached(tiny_dir, folder, "detached.max_staleness=1", *more)


def test_makers_run_ahead_by_the_versions_that_are_allowed(ahead: Path) -> None:
    ages = [line["detached/staleness/max"] for line in lines(ahead)]
    assert ages[0] == 0
    assert max(ages) == 1


def test_files_of_samples_say_who_made_each_and_how_old_it_was(ahead: Path) -> None:
    makers: Counter[str] = Counter()
    for line in lines(ahead):
        rows = lines(ahead, f"rollouts/{line['step']}.jsonl")
        ages = [row["trained_by_version"] - row["weight_version"] for row in rows]
        assert max(ages) == line["detached/staleness/max"]
        assert sum(ages) / len(ages) == pytest.approx(line["detached/staleness/mean"])
        makers.update(str(row["maker"]) for row in rows)
        assert {row["trainer"] for row in rows} == {0}
    assert makers == {name: row["made"] for name, row in ledger_of(ahead)["makers"].items()}


def test_every_sample_that_was_made_was_trained_on(ahead: Path) -> None:
    kept = ledger_of(ahead)
    rows = kept["makers"].values()
    assert sum(row["made"] for row in rows) == 8 * 32
    assert all(row["made"] == row["trained"] for row in rows)
    assert kept["trainers"] == {"0": 8 * 32}
    assert sum(kept["staleness"].values()) == 8 * 32


def test_every_prompt_is_trained_on_once_in_every_epoch(ahead: Path) -> None:
    steps = uids_of(ahead, len(lines(ahead)))
    assert [len(uids) for uids in steps] == [2 * 16] * 8
    for epoch, first in enumerate((0, 4)):
        two_of_each = [f"{row}-{epoch}" for row in (*range(64), *range(64))]
        assert sorted(sum(steps[first : first + 4], [])) == sorted(two_of_each)


def test_makers_and_trainers_are_processes_of_their_own(ahead: Path) -> None:
    makers = {event["args"]["pid"] for event in calls(ahead, "submit")}
    trainers = {event["args"]["pid"] for event in calls(ahead, "update_actor")}
    assert len(makers) == 2
    assert not makers & trainers


def test_seconds_of_every_role_add_up_to_the_wall(ahead: Path) -> None:
    for line in lines(ahead)[1:]:
        walls = []
        for role in ("maker_0", "maker_1", "trainer"):
            states = ("busy", "waiting", "syncing")
            walls.append(sum(line[f"detached/{role}/{state}_s"] for state in states))
        assert max(walls) == pytest.approx(min(walls), abs=1e-3)


def test_a_batch_is_trained_on_as_often_as_there_are_epochs(tiny_dir: Path, tmp_path: Path) -> None:
    rounds = ("detached.update_steps=2", "detached.train_epochs=2")
    more = (*rounds, "trainer.total_training_steps=8", *POLICY_ALONE)
    folder = detached(tiny_dir, tmp_path, *more)
    assert ledger_of(folder)["makers"]["0"]["made"] == 4 * 16
    assert [line["training/weight_version"] for line in lines(folder)[3::4]] == [2, 3]
    texts = [(folder / "rollouts" / f"{step}.jsonl").read_text() for step in range(1, 9)]
    uids = [{json.loads(line)["uid"] for line in text.splitlines()} for text in texts]
    assert uids[2:4] in (uids[0:2], uids[1::-1])
    assert not uids[0] & uids[4]

    of_round = [int(line["detached/batch_of_round"]) for line in lines(folder)]
    assert of_round[:2] == of_round[4:6] == [0, 1]
    assert uids[2:4] == [uids[place] for place in of_round[2:4]]
    assert uids[6:] == [uids[4 + place] for place in of_round[6:]]
    for line in lines(folder):
        is_fresh = line["detached/reused"] == 0
        drawn = line["response_length/mean"] * 16 if is_fresh else 0
        assert line["detached/drawn_tokens"] == pytest.approx(drawn)


def test_a_resumed_synchronous_run_goes_on_bit_for_bit(
    tiny_dir: Path, tmp_path: Path, plain: Path
) -> None:
    in_background = "role_workers.actor=tests.integration.background_actors.BackgroundActor"
    settings = ("detached.max_staleness=0", "trainer.save_freq=1", in_background)
    folder = detached(tiny_dir, tmp_path, *settings, TWO_STEPS)
    assert calls(folder, "write_checkpoint"), "that of step 1, beside step 2"
    detached(tiny_dir, tmp_path, *settings)
    assert shared_numbers(folder) == shared_numbers(plain)


def test_samples_of_older_weights_are_corrected_unless_the_user_says_how(
    tiny_dir: Path, tmp_path: Path
) -> None:
    def correction(*more: str) -> tuple[str | None, bool]:
        config = load_config(overrides(tiny_dir, tmp_path, LOCAL, *more), DETACHED)
        settings = config.algorithm.rollout_correction
        return settings.rollout_is, settings.bypass_mode

    assert correction("detached.max_staleness=1") == ("token", False)
    assert correction("detached.max_staleness=0") == (None, False)
    rounded = "detached.maker_settings.1={quantization: int8}"
    assert correction("detached.max_staleness=0", "detached.makers=2", rounded)[0] == "token"
    assert correction("correction=disabled") == (None, False)
    assert correction("correction=decoupled_seq_is") == ("sequence", False)
    assert correction("algorithm.rollout_correction.rollout_is=null") == (None, False)


def test_settings_of_a_maker_have_the_types_of_the_rollouts_keys_however_it_is_named(
    tiny_dir: Path, tmp_path: Path
) -> None:
    for setting in (
        "={0: {kv_cache_gb: 1, max_num_seqs: 8}}",
        ".0={kv_cache_gb: '1', dtype: null}",
    ):
        by_key = f"detached.maker_settings{setting}"
        config = load_config(overrides(tiny_dir, tmp_path, LOCAL, by_key), DETACHED)
        rollout = config.of_role("rollout").actor_rollout_ref.rollout
        assert (rollout.kv_cache_gb, type(rollout.kv_cache_gb)) == (1.0, float)
        assert rollout.max_num_seqs == (8 if "8" in setting else 256)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["detached.limit=4"], "limit=4 samples hold no batch of 16"),
        (["detached.prompts_per_piece=3"], "does not divide the 8 prompts.*nearest.*2 and 4"),
        (["algorithm.adv_estimator=remax"], "remax compares every sample with a greedy answer"),
        (["role_mapping.rollout=trainer_pool"], "is the pool of .* too: a maker"),
        (["detached.edges=[[0,3]]"], "names trainer 3"),
        (["detached.topology=2x"], "topology '2x' is none"),
        (["detached.when_full=evict_oldest"], "needs a detached.limit"),
        (["detached.maker_settings.4={name: hf}"], "settings.4: this run has makers 0 to 0"),
        (["detached.maker_settings.0={sync: changed}"], "no key 'detached.maker_settings.0.sync'"),
        (["detached.maker_settings.x={name: hf}"], "has 'x': give each maker's number once"),
        (
            ["trainer.cls=trainer.ppo.PPOTrainer"],
            "trainer.ppo.PPOTrainer is no subclass of trainer.detached.step.DetachedTrainer",
        ),
        (["detached.maker_settings.0={nam: hf}"], "settings.0.nam'. Did you mean 'name'"),
        (["detached.maker_settings.0={name: sglang}"], "maker_settings.0: .*sglang"),
        (
            ["detached.maker_settings.0=hf"],
            "0=hf: .*str is not a subclass of MakerSettings",
        ),
        (
            ["detached.maker_settings.0={kv_cache_gb: -1}"],
            "0: .*kv_cache_gb=-1.0: it must be",
        ),
        (["detached.maker_settings={0: {max_num_seqs: 0}}"], "0: .*max_num_seqs=0: it must be"),
        (["detached.maker_settings.0={max_num_seqs: many}"], "'many' .*converted to Integer"),
        (
            ["detached.maker_settings={0: {name: hf}}", "detached.maker_settings.0.dtype=float32"],
            "has 0: give each maker's number once",
        ),
        (
            ["detached.new_weights=at_once", "actor_rollout_ref.rollout.name=builtins.object"],
            "the engine builtins.object of rollout takes no weights within a generation",
        ),
        (["detached.train_epochs=2", "trainer.save_freq=3"], "Take a multiple of 2"),
        (
            [*APART, "algorithm.filter_groups.enable=true"],
            r"filter_groups.enable=true chooses .*edges=\[\[0,0\],\[0,1\],\[1,0\],\[1,1\]\]",
        ),
        ([*APART, "algorithm.use_pf_ppo=true"], "use_pf_ppo=true chooses a batch's rows among"),
        (
            [*APART, *ENDS_AT_13],
            "=13 ends in a batch of 5 prompts, .* 2 trainer ranks.*nearest that do: 12 and 14",
        ),
        (
            [*APART, "data.train_batch_size=7", "actor_rollout_ref.actor.ppo_mini_batch_size=7"],
            "=7 prompts do not divide among the 2 trainer ranks.*nearest that do: 6 and 8",
        ),
        (
            [
                "detached.sampler=ready_first",
                "data.total_prompts=12",
                "trainer.total_training_steps=null",
            ],
            "=12 ends in a part of a batch of 8, which only detached.sampler=in_order keeps",
        ),
        (
            ["detached.makers=2", "role_mapping.rollout_1=maker_0_pool"],
            "maker_0_pool is the pool of rollout_1 too: .* each needs its own",
        ),
        (["resource_pool_spec.trainer_pool=[2]"], "has 2 ranks, and detached.trainers=1"),
        (
            ["detached.sampler=version_window", "detached.window=3"],
            "window=3 is wider than detached.max_staleness=1",
        ),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(
    tiny_dir: Path, tmp_path: Path, settings: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(overrides(tiny_dir, tmp_path, LOCAL, *settings), DETACHED)


@pytest.mark.parametrize(
    "key",
    [
        "detached.maker_settings.0.tensor_model_parallel_size",
        "actor_rollout_ref.rollout.tensor_model_parallel_size",
    ],
)
def test_a_key_that_a_maker_does_not_read_is_a_notice(
    key: str, tiny_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load_config(overrides(tiny_dir, tmp_path, LOCAL, f"{key}=2"), DETACHED)
    assert f"notice: {key} has no effect: " in caplog.text


def test_a_run_that_ended_within_a_round_does_not_go_on_from_there(
    tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = ("detached.train_epochs=2", "detached.update_steps=2")
    config = load_config(overrides(tiny_dir, tmp_path, LOCAL, *rounds), DETACHED)
    start = SimpleNamespace(start=tmp_path / "global_step_6", start_step=6, why_finished="")
    monkeypatch.setattr(checks, "ResumePoint", lambda config: start)
    with pytest.raises(CheckpointError, match="global_step_6 is of .* within a round .* 4 steps"):
        DetachedTrainer.prepare(config, ExitStack())
    start.why_finished = "nothing is left to do"
    checks.check_start(config)
    start.start_step = 8
    checks.check_start(config)


def test_an_engine_that_one_makers_pool_does_not_divide_into_is_refused_by_a_dry_run(
    tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.rollouts.preflight.joined_cluster", lambda config: True)
    engine = ("name=vllm", "tensor_model_parallel_size=2")
    settings = [f"actor_rollout_ref.rollout.{setting}" for setting in engine]
    settings += ["detached.makers=2", "resource_pool_spec.maker_0_pool=[2]", "trainer.dry_run=true"]
    with pytest.raises(ConfigError, match="size=2 does not divide the 1 processes of rollout_1's"):
        run(load_config(overrides(tiny_dir, tmp_path, LOCAL, *settings), DETACHED))


def test_an_engine_of_one_maker_that_does_not_fit_its_pool_is_refused_by_a_dry_run(
    tiny_dir: Path, tmp_path: Path
) -> None:
    of_one = "detached.maker_settings.1={name: vllm, tensor_model_parallel_size: 2}"
    settings = ("detached.makers=2", of_one, "trainer.dry_run=true")
    words = "maker_settings.1: .*size=2 does not divide the 1 processes of rollout_1's"
    with pytest.raises(ConfigError, match=words):
        run(load_config(overrides(tiny_dir, tmp_path, LOCAL, *settings), DETACHED))
