"""The first difference between two records, its stage and its cause."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trainer.cli.bisect import bisect, main
from trainer.ppo.advantages.estimators import (
    compute_gae_advantage_return,
    compute_grpo_outcome_advantage,
)
from trainer.tools.bisect.sides import OURS, Side, read_arrays
from trainer.tools.bisect.walk import different_settings
from verl_like.record import Recorder, RecordError
from workers.losses.aggregate import agg_loss

Change = Callable[[dict[str, Any], dict[str, Any]], None]


def step_of(seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arrays and numbers of a step of GRPO: 6 prompts with 4 samples."""
    random, rows, width = np.random.default_rng(seed), 24, 7
    lengths = random.integers(2, width + 1, rows)
    mask = np.arange(width) < lengths[:, None]
    scores = random.normal(size=rows).astype(np.float32)
    group = np.arange(rows) // 4
    rewards = torch.zeros(rows, width)
    rewards[torch.arange(rows), torch.from_numpy(lengths) - 1] = torch.from_numpy(scores)
    inside = torch.from_numpy(mask).float()
    advantages, _ = compute_grpo_outcome_advantage(rewards, inside, group)
    arrays = {
        "prompts": np.repeat(random.integers(3, 50, (6, 5)), 4, 0),
        "responses": random.integers(3, 50, (rows, width)),
        "response_mask": mask.astype(np.int64),
        "response_lengths": lengths,
        "rollout_log_probs": (-random.random((rows, width)) * mask).astype(np.float32),
        "group": group,
        "scores": scores,
        "token_level_rewards": rewards.numpy(),
        "advantages": advantages.numpy(),
    }
    loss = float(agg_loss(-advantages, inside, "token-mean"))
    return arrays, {"pg_loss": loss, "grad_norm": 0.5, "lr": 1e-3, "weight_norms": {"w": 2.0}}


def two_records(folder: Path, change: Change) -> tuple[str, str]:
    names = str(folder / "a"), str(folder / "b")
    for name in names:
        recorder = Recorder(name, "mine", {"lr": 1e-3})
        for number in (1, 2, 3):
            arrays, numbers = step_of(number)
            if name == names[1]:
                change(arrays, numbers)
            recorder.step(number, arrays, **numbers)
    return names


def other_loss(mode: str) -> Change:
    def change(arrays: dict[str, Any], numbers: dict[str, Any]) -> None:
        tensors = [torch.tensor(arrays[name]) for name in ("advantages", "response_mask")]
        numbers["pg_loss"] = float(agg_loss(-tensors[0], tensors[1], mode))

    return change


def other_advantages(**settings: Any) -> Change:
    def change(arrays: dict[str, Any], numbers: dict[str, Any]) -> None:
        inputs = (torch.tensor(arrays[n]) for n in ("token_level_rewards", "response_mask"))
        advantages, _ = compute_grpo_outcome_advantage(*inputs, arrays["group"], **settings)
        arrays["advantages"] = advantages.numpy()

    return change


def scaled(name: str, factor: float) -> Change:
    def change(arrays: dict[str, Any], numbers: dict[str, Any]) -> None:
        where = arrays if name in arrays else numbers
        where[name] = where[name] * factor

    return change


def without_end(arrays: dict[str, Any], numbers: dict[str, Any]) -> None:
    rows = np.arange(len(arrays["responses"]))
    arrays["response_mask"][rows, arrays["response_lengths"] - 1] = 0


def reordered(arrays: dict[str, Any], numbers: dict[str, Any]) -> None:
    for name, array in arrays.items():
        arrays[name] = array[::-1]


@pytest.mark.parametrize(
    ("change", "stage", "cause"),
    [
        (other_advantages(norm_adv_by_std_in_grpo=False), "advantages", "norm_adv_by_std_in_grpo"),
        (other_advantages(epsilon=1e-4), "advantages", "epsilon=0.0001"),
        (other_loss("seq-mean-token-mean"), "loss", "seq-mean-token-mean"),
        (other_loss("seq-mean-token-sum"), "loss", "seq-mean-token-sum"),
        (scaled("scores", 2.0), "scores", "times 2"),
        (scaled("lr", 0.5), "learning rate", "times 0.5"),
        (scaled("grad_norm", 4.0), "gradients", "times 4"),
        (without_end, "mask", "last token"),
        (reordered, "order", "another order"),
    ],
)
def test_the_first_stage_and_its_cause_are_named(
    tmp_path: Path, change: Change, stage: str, cause: str
) -> None:
    finding = bisect(*two_records(tmp_path, change))
    assert (finding.verdict, finding.stage, finding.step) == ("differs", stage, 1)
    assert cause in str(finding.causes)


@pytest.mark.parametrize("bootstrap", [True, False])
def test_lambdas_of_runs_with_truncated_rows_are_named(tmp_path: Path, bootstrap: bool) -> None:
    for name, lam in (("a", 0.9), ("b", 1.0)):
        arrays, _ = step_of(1)
        arrays["values"] = arrays["rollout_log_probs"] + 0.5 * arrays["response_mask"]
        arrays["truncated"] = arrays["response_lengths"] == arrays["responses"].shape[1]
        columns = ("token_level_rewards", "values", "response_mask", "truncated")
        rewards, values, mask, truncated = (torch.tensor(arrays[x]) for x in columns)
        ends = truncated if bootstrap else None
        arrays["advantages"], _ = compute_gae_advantage_return(
            rewards, values, mask, 1.0, lam, ends
        )
        settings = {"algorithm.adv_estimator": "gae", "algorithm.bootstrap_truncated": bootstrap}
        recorder = Recorder(tmp_path / name, OURS, settings | {"algorithm.lam": lam})
        recorder.step(1, arrays)
    finding = bisect(str(tmp_path / "a"), str(tmp_path / "b"))
    assert (finding.verdict, finding.stage) == ("differs", "advantages")
    assert "computes with algorithm.lam=0.9; B computes with algorithm.lam=1.0" in str(
        finding.causes
    )


def test_another_number_of_threads_is_a_cause_of_other_gradients(tmp_path: Path) -> None:
    for name, threads, norm in (("a", 1, 0.5), ("b", 2, 0.51)):
        recorder = Recorder(tmp_path / name, OURS, {"trainer.threads_per_process": threads})
        recorder.step(1, {}, grad_norm=norm)
    finding = bisect(str(tmp_path / "a"), str(tmp_path / "b"))
    assert finding.stage == "gradients"
    assert "trainer.threads_per_process is 1 in A and 2 in B" in str(finding.causes)


def with_moments(
    folder: Path,
    name: str,
    betas: tuple[float, float],
    begin: int = 1,
    framework: str = "mine",
    **arrays: Any,
) -> str:
    """Record three steps with gradients of norm 0.5 and Adam's moments, which begin at a step."""
    recorder, moments = Recorder(folder / name, framework), [0.0, 0.0]
    for number in (1, 2, 3):
        if number == begin:
            moments = [0.0, 0.0]
        moments = [m * b + (1 - b) * g for m, b, g in zip(moments, betas, (0.5, 0.25), strict=True)]
        norms = {"exp_avg_norms": {"w": moments[0]}, "exp_avg_sq_norms": {"w": moments[1] ** 0.5}}
        recorder.step(number, arrays, grad_norms={"w": 0.5}, **norms)
    return str(folder / name)


@pytest.mark.parametrize(
    ("settings", "step", "cause"),
    [
        (((0.5, 0.999), 1), 1, "optim.betas.0=0.5"),
        (((0.9, 0.95), 1), 1, "optim.betas.1=0.95"),
        (((0.9, 0.999), 2), 2, "Adam's moments, which begin at this step"),
    ],
)
def test_a_difference_of_adam_s_moments_is_named(
    tmp_path: Path, settings: Any, step: int, cause: str
) -> None:
    sides = with_moments(tmp_path, "a", (0.9, 0.999)), with_moments(tmp_path, "b", *settings)
    finding = bisect(*sides)
    assert (finding.stage, finding.step) == ("optimizer", step)
    assert cause in str(finding.causes)


def test_betas_of_two_frameworks_are_compared_on_different_samples(tmp_path: Path) -> None:
    a = with_moments(tmp_path, "a", (0.9, 0.999), 1, "trl", prompts=[[1]], responses=[[2, 3]])
    b = with_moments(tmp_path, "b", (0.9, 0.95), 1, "mine", prompts=[[1]], responses=[[2, 4]])
    finding = bisect(a, b)
    assert (finding.stage, finding.name) == ("optimizer", "exp_avg_sq_norms")
    assert "optim.betas.1=0.95" in str(finding.causes)


def test_a_loss_without_samples_has_a_setting_as_cause(tmp_path: Path) -> None:
    for name, x in (("a", 1.0), ("b", 0.3)):
        Recorder(tmp_path / name, "mine", {"beta": x}).step(1, loss=x)
    finding = bisect(str(tmp_path / "a"), str(tmp_path / "b"))
    assert (finding.stage, finding.causes[0]["setting"]) == ("loss", "beta")


def test_files_with_the_same_contents_are_no_different_setting(tmp_path: Path) -> None:
    sides = []
    for number, rows in enumerate(["1\n2\n", "1\n2\n", "1\n3\n"]):
        file = tmp_path / f"rows-{number}.jsonl"
        file.write_text(rows)
        settings = {"data.train_files": [str(file)], "reward.list": [{"path": str(file), "n": 1}]}
        settings["chat_template"] = f"{{# {number // 2} #}}" * 60  # longer than a file's name
        sides.append(Side(str(number), OURS, settings, {}, lambda _: {}))
    assert different_settings(sides[0], sides[1]) == {}
    changed = different_settings(sides[0], sides[2])
    assert [*changed] == ["chat_template", "data.train_files", "reward.list"]


def test_another_spelling_of_no_limit_is_no_different_setting() -> None:
    ours = Side("b", OURS, {"actor_rollout_ref.rollout.top_k": -1}, {}, lambda _: {})
    assert not different_settings(Side("a", "trl", {"top_k": 0}, {}, lambda _: {}), ours)
    limited = Side("a", "trl", {"top_k": 50}, {}, lambda _: {})
    assert different_settings(limited, ours) == {"actor_rollout_ref.rollout.top_k": [50, -1]}


def test_noise_below_the_rounding_of_a_stage_is_no_difference(tmp_path: Path) -> None:
    def change(arrays: dict[str, Any], numbers: dict[str, Any]) -> None:
        arrays["rollout_log_probs"] += np.float32(1e-5)
        numbers["grad_norm"] *= 1 + 1e-5

    assert bisect(*two_records(tmp_path, change)).verdict == "equal"


@pytest.mark.parametrize(("change", "code"), [(scaled("lr", 1.0), 0), (scaled("lr", 3.0), 1)])
def test_the_exit_code_says_whether_a_number_differs(
    tmp_path: Path, change: Change, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main([*two_records(tmp_path, change), "--json"])
    assert end.value.code == code
    assert json.loads(capsys.readouterr().out)["verdict"] == ("differs" if code else "equal")


def test_records_without_a_common_field_cannot_tell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Recorder(tmp_path / "a", "mine").step(1, loss=1.0)
    Recorder(tmp_path / "b", "mine").step(1, lr=1.0)
    with pytest.raises(SystemExit) as end:
        main([str(tmp_path / "a"), str(tmp_path / "b")])
    assert end.value.code == 2
    assert "no common field: A has loss; B has lr" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("steps", "sentence"),
    [
        ((1,), "B ends after step 1, A goes on to step 3"),
        ((1, 3), "B has no step 2"),
        ((1, 2, 3, 4, 5), "A ends after step 3, B goes on to step 5"),
    ],
)
def test_a_record_that_ends_early_is_not_equal(
    tmp_path: Path, steps: tuple[int, ...], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, numbers in (("a", (1, 2, 3)), ("b", steps)):
        recorder = Recorder(tmp_path / name, "mine")
        for number in numbers:
            recorder.step(number, loss=1.0)
    with pytest.raises(SystemExit) as end:
        main([str(tmp_path / "a"), str(tmp_path / "b")])
    assert end.value.code == 2
    assert f"cannot tell: {sentence}" in capsys.readouterr().out


def test_a_record_may_begin_later_than_the_other(tmp_path: Path) -> None:
    for name, numbers in (("a", (0, 1, 2, 3)), ("b", (2, 3))):
        recorder = Recorder(tmp_path / name, "mine")
        for number in numbers:
            recorder.step(number, loss=1.0)
    assert bisect(str(tmp_path / "a"), str(tmp_path / "b")).verdict == "equal"


def header_of(spec: dict[str, Any]) -> bytes:
    text = json.dumps({"x": spec}).encode()
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    "contents",
    [
        b"",
        b"\x80\x04K\x01.",
        (1 << 60).to_bytes(8, "little") + b"{}",
        (61).to_bytes(8, "little")
        + b'{"x":{"dtype":"F32","shape":[9999],"data_offsets":[0,39996]}}',
        (60).to_bytes(8, "little")
        + b'{"x":{"dtype":"F32","shape":[-1],"data_offsets":[0,-4]   }  }',
        (5000).to_bytes(8, "little") + b"[" * 5000,
    ],
)
def test_a_hostile_file_is_an_error_by_name(tmp_path: Path, contents: bytes) -> None:
    path = tmp_path / "1.safetensors"
    path.write_bytes(contents)
    with pytest.raises(RecordError, match=r"1\.safetensors"):
        read_arrays(tmp_path, 1)


def test_a_record_is_read_by_the_safetensors_package(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    arrays, _ = step_of(1)
    Recorder(tmp_path, "mine").step(1, arrays)
    loaded = load_file(tmp_path / "1.safetensors")
    assert all(np.array_equal(loaded[name], arrays[name]) for name in arrays)
