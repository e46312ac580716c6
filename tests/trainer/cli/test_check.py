"""`verl-like check` checks a run and describes what it will do, with units."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.integration.runs import overrides
from tests.trainer.tools.report.report_runs import make_run
from trainer import PPOTrainer, load_config
from trainer.async_training.recipe import ASYNC
from trainer.cli.check import explain, full_plan, main
from trainer.launch import NO_ERRORS
from trainer.ppo.recipe import PPO
from verl_like.errors import ConfigError

TWO_POOLS = ("trainer.backend=ray", "placement=split", "trainer.n_gpus_per_node=2")
REQUIRED = ("data.train_files=train.parquet", "actor_rollout_ref.model.path=model")


def test_a_misspelled_option_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="--ful is not an option. Did you mean '--full'"):
        main(["--ful", *REQUIRED])


def explained(*overrides: str) -> str:
    return explain(load_config([*REQUIRED, *overrides]), settings=[*REQUIRED, *overrides])


def test_a_split_placement_lists_axes_of_ranks_and_concurrent_calls() -> None:
    axes = ("actor_rollout_ref.actor.parallel.tp=2", "critic.parallel.sp=4")
    text = explained("placement=split", "trainer.n_gpus_per_node=8", *axes)
    assert "actor (shard 2, tp 2), rollout" in text
    assert re.search(r"critic_pool +4 CPU slots +critic \(sp 4\)", text)
    assert "critic.update_critic ‖ actor.update_actor" in text
    assert "rewards ‖ actor.compute_log_prob ‖ critic.compute_values" in text


def test_a_pool_for_the_critic_is_proposed_only_if_there_is_a_device_for_it() -> None:
    for gpus in ("1xH100", "2xH100"):
        proposes = "Set placement=split for" in explained(f"trainer.simulate={gpus}")
        assert proposes is (gpus == "2xH100")


def changed_keys(*overrides: str) -> dict[str, str]:
    """Return key -> the title of its group in the section about changed keys."""
    section = explained(*overrides).partition("Changed from the defaults\n")[2]
    keys, title = {}, ""
    for line in section.partition("\n\n")[0].splitlines()[1:]:
        if line.startswith("  "):
            keys[line.strip().partition("=")[0]] = title
        else:
            title = line
    return keys


def test_changed_keys_are_grouped_by_who_changed_them() -> None:
    grouped = changed_keys("algorithm=grpo", "actor_rollout_ref.rollout.n=4")
    assert grouped["actor_rollout_ref.rollout.n"] == "Set by you:"
    assert grouped["algorithm"] == "Set by you:", "the preset itself"
    assert grouped["algorithm.adv_estimator"] == "Set by the preset algorithm=grpo:"
    assert grouped["actor_rollout_ref.rollout.name"] == "Chosen for your settings and devices:"


def test_keys_of_a_user_s_yaml_are_a_group(tmp_path: Path) -> None:
    (tmp_path / "letters.yaml").write_text(
        "defaults: [ppo_trainer, _self_]\nactor_rollout_ref: {rollout: {n: 4}}\n"
    )
    recipe = PPO.with_files_of(tmp_path, "letters")
    config = load_config([*REQUIRED], recipe)
    text = explain(config, recipe=recipe, settings=REQUIRED)
    group = "Set by your YAML files:\n  actor_rollout_ref.rollout.n=4 (default 1)\nChosen"
    assert group in text


def test_keys_that_only_the_recipe_sets_are_not_listed_as_changed() -> None:
    folder, critic = "trainer.default_local_dir", "critic.model.path"
    recipe_keys = {folder, critic, "role_workers"}
    assert not recipe_keys & {*changed_keys()}
    assert not recipe_keys & {*changed_keys("trainer.project_name=mine")}
    assert {folder, critic} <= {*changed_keys(f"{folder}=out", f"{critic}=judge")}


def test_unread_keys_are_not_listed_as_changed() -> None:
    key = "critic.cliprange_value"
    assert key in changed_keys(f"{key}=0.1")
    assert key not in changed_keys(f"{key}=0.1", "algorithm=grpo")


def test_metrics_to_watch_depend_on_estimator_and_loss() -> None:
    text = explained("algorithm=gspo").partition("Metrics to watch")[2].partition("Changed")[0]
    assert "grpo: If `actor/grad_norm`" in text
    assert "gspo: `actor/pg_clipfrac` is usually 0.1 or more" in text
    assert "set `actor_rollout_ref.actor.clip_ratio_low` and" in text


def test_only_the_user_s_keys_without_effect_are_listed_with_the_reason() -> None:
    text = explained("algorithm.adv_estimator=reinforce_plus_plus", "critic.cliprange_value=0.1")
    section = text.partition("Keys that you set without effect")[2].partition("\n\n")[0]
    _, *lines = section.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("critic.cliprange_value: this run has no critic")


def test_generation_and_training_of_a_measured_run_are_compared(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", 3, samples=1)
    config = load_config([*REQUIRED, "async_training.generators=2"], ASYNC)
    settings = [*REQUIRED, "async_training.generators=2"]
    text = full_plan(config, str(folder), ASYNC, settings)
    assert re.search(r"generator 1 +rollout_1 +generator_1_pool", text)
    assert "Generation takes" in text
    assert "async_training.generators=2 (default 1)\n" in text
    assert "role_workers=" not in text, "the run adds the workers of generator 1"
    assert "--measured RUN_DIR" in full_plan(config, "", ASYNC, settings)


def test_measured_works_only_with_async() -> None:
    with pytest.raises(ConfigError, match=r"--measured=x works only with `verl-like check async"):
        main(["--measured=x", *REQUIRED])


@pytest.mark.parametrize("options", [["--gpus=8"], ["--gpus=8xH100", "--device=H100"]])
def test_the_gpu_is_named_once(options: list[str]) -> None:
    with pytest.raises(ConfigError, match="Write --gpus 8xH100, or --gpus 8 --device H100"):
        main([*options, *REQUIRED])


def test_an_algorithm_s_name_is_a_recipe_to_check(
    tiny_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["--full", "grpo", *overrides(tiny_dir, tmp_path / "run", "trainer.backend=local")])
    assert "algorithm.adv_estimator=grpo (default gae)" in capsys.readouterr().out


def test_a_run_is_checked_for_gpus_of_another_machine(
    tiny_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["--gpus=2", "--device=H100", *overrides(tiny_dir, tmp_path / "run", *TWO_POOLS)])
    text = " ".join(capsys.readouterr().out.split())
    assert "2 x H100" in text
    assert NO_ERRORS in text
    assert "Next: start the run: verl-like ppo \\ " in text
    assert "trainer.simulate" not in text.partition("Next: ")[2]
    assert "Calls of a step" not in text
    assert not (tmp_path / "run").exists()


OWN_ROLE = (
    "trainer.cls=verifier.TrainerWithVerifier",
    "+role_workers.verifier=verifier.VerifierWorker",
    "+role_mapping.verifier=global_pool",
)


class NeedsAColumn(PPOTrainer):
    """Needs a column that no worker declares."""

    def estimate(self, batch: Any) -> Any:
        return super().estimate(batch.select(["mine"]))


def test_the_short_plan_lists_calls_of_the_user_s_roles(
    tiny_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend("examples/custom_role")
    main([*overrides(tiny_dir, tmp_path / "run", "trainer.backend=local", *OWN_ROLE)])
    calls = "verifier.compute_verdicts in score, verifier.update_verifier in update"
    assert f"Calls of your roles: {calls}\n" in capsys.readouterr().out


def test_the_short_plan_says_that_a_step_fails_on_stubs(
    tiny_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    setting = f"trainer.cls={__name__}.NeedsAColumn"
    main([*overrides(tiny_dir, tmp_path / "run", "trainer.backend=local", setting)])
    assert "note: further calls are not known" in capsys.readouterr().out


def test_a_python_that_starts_no_worker_is_rejected(tiny_dir: Path, tmp_path: Path) -> None:
    settings = overrides(tiny_dir, tmp_path / "run", *TWO_POOLS)
    with pytest.raises(SystemExit, match="runtime_env.py_executable=uv run --nowhere: this Python"):
        main([*settings, "ray.runtime_env={py_executable: uv run --nowhere}"])


def test_an_error_about_data_comes_before_the_memory(
    tiny_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = overrides(tiny_dir, tmp_path / "run", f"data.train_files={tmp_path}/absent.jsonl")
    with pytest.raises(SystemExit) as ended:
        main(["--full", *settings])
    error, memory, store = str(ended.value).splitlines()
    assert "absent.jsonl" in error
    assert re.fullmatch(r"  Peak memory per device: .* MiB", memory)
    assert store.startswith("  Ray's object store on the driver's node: about ")
    assert capsys.readouterr().out == ""


def test_a_recipe_on_rows_is_checked_by_its_name(
    tiny_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "say a", "response": "ab"}\n' * 4, encoding="utf-8")
    settings = (f"data.train_files={rows}", "data.train_batch_size=2", "trainer.backend=local")
    folder = f"trainer.default_local_dir={tmp_path}/run"
    main(["sft", "--full", *settings, f"model.path={tiny_dir}/model", folder])
    text = capsys.readouterr().out
    assert "Memory per device\n-----------------\nglobal_pool: " in text
    assert "\nEstimated MiB per device" in text
    assert "Batch sizes\n-----------\n2 rows of at most" in text
    assert "\n  data.train_batch_size=2 (default 64)\n" in text
    assert NO_ERRORS in text
