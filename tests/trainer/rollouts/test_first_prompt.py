"""A dry run shows the first prompt as the model reads it, and says what may not be as you mean."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.integration.runs import POLICY_ALONE
from trainer import load_config, run

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{{ eos_token }}{% endfor %}"
)
END = "{% if add_generation_prompt %}<assistant>{% endif %}"
CHAT = [{"role": "user", "content": "say a"}]
NUM_ROWS = 8
REWARD = "def score(response, ground_truth=None): return float(response == ground_truth)"


class Check:
    """Checks a job of the tiny model with other rows, and perhaps another template."""

    def __init__(self, tiny: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.tiny, self.folder, self.capsys = tiny, folder, capsys

    def __call__(
        self, prompts: Sequence[Any], *more: str, template: str = "", truth: str | None = "a"
    ) -> str:
        """Return the output of the check."""
        model = self.tiny / "model"
        if template:
            model = self.folder / "model"
            model.mkdir()
            for file in (self.tiny / "model").iterdir():
                (model / file.name).symlink_to(file)
            (model / "chat_template.jinja").unlink()
            (model / "chat_template.jinja").write_text(template)
        rows = [{"prompt": prompt} for prompt in prompts]
        if truth is not None:
            rows = [row | {"ground_truth": truth} for row in rows]
        (self.folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
        (self.folder / "rewards.py").write_text(REWARD)
        settings = [
            f"actor_rollout_ref.model.path={model}",
            f"data.train_files={self.folder}/rows.jsonl",
            f"trainer.default_local_dir={self.folder}/run",
            f"reward={self.folder}/rewards.py:score",
            *POLICY_ALONE,
            "data.train_batch_size=4",
            "actor_rollout_ref.actor.ppo_mini_batch_size=4",
            "actor_rollout_ref.rollout.n=2",
            "data.max_prompt_length=128",
            "data.max_response_length=8",
            "trainer.backend=local",
            "trainer.dry_run=true",
            *more,
        ]
        run(load_config(settings))
        return self.capsys.readouterr().out


@pytest.fixture
def check(tiny_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Check:
    return Check(tiny_dir, tmp_path, capsys)


def chats(*texts: str) -> list[Any]:
    return [[{"role": "user", "content": text}] for text in texts]


DIFFERENT = [f"say {letter}" for letter in "abcdefgh"]


def test_the_first_prompt_has_its_special_tokens_and_a_slot_for_the_response(check: Check) -> None:
    text = check(chats(*DIFFERENT), template=TEMPLATE + END)
    shown = text.partition("First prompt, as the model reads it (")[2].splitlines()
    assert shown[0].endswith(" tokens):")
    line = shown[1].replace(" ", "")
    assert line == "<bos><user>saya<eos><assistant>[response:atmost8tokens,endswith<eos>]"
    assert "note:" not in text


def test_a_long_prompt_lacks_its_middle(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.rollouts.first_prompt.MAX_CHARACTERS", 40)
    text = check(chats("x" * 80, *DIFFERENT))
    assert re.search(r"<bos>.*x\[\.\.\. \d\d characters \.\.\.\]x*.*<assistant>\[response", text)


@pytest.mark.parametrize(
    ("prompts", "template", "note"),
    [
        (DIFFERENT, "", "note: the prompts are plain strings, .* write each as messages"),
        (
            [f"<user>{text}<eos>" for text in DIFFERENT],
            "",
            "note: the prompt ends after <eos>, without the beginning of the assistant's turn",
        ),
        (
            chats(*DIFFERENT),
            TEMPLATE + "<assistant>",
            "",
        ),
        (
            chats(*DIFFERENT),
            TEMPLATE,
            "note: the chat template ignores add_generation_prompt: the prompt lacks '<assistant>'",
        ),
        (
            chats(*DIFFERENT),
            "{{ bos_token }}" + TEMPLATE + END,
            "note: the prompt begins with '<bos>' twice",
        ),
        (chats(*["say a"] * NUM_ROWS), "", "note: all 8 prompts of data.train_files are equal"),
        (
            chats(*DIFFERENT[:4], *DIFFERENT[:4]),
            "",
            r"note: 4 of 8 prompts of data.train_files \(50%\) repeat an earlier one",
        ),
    ],
)
def test_a_prompt_that_may_not_be_meant_gets_a_note(
    check: Check, prompts: Sequence[Any], template: str, note: str
) -> None:
    text = check(prompts, template=template)
    notes = [line for line in text.splitlines() if line.startswith("note: ")]
    assert len(notes) == bool(note), notes
    assert not note or re.match(note, notes[0]), notes


def test_the_reward_check_says_what_it_scored(check: Check) -> None:
    scored = "8 rows with their ground truth as response; every score is 1\n"
    assert scored in check(chats(*DIFFERENT))
    text = check(chats(*DIFFERENT), truth=None)
    assert "8 rows with their prompt as response, because they have no ground truth" in text
    assert "ground truth as response" not in text
    assert "check the reward" not in text


def test_a_tokenizer_that_cannot_write_the_truth_is_named_instead_of_the_reward(
    check: Check,
) -> None:
    text = check(chats(*DIFFERENT), truth="\u4e00\u4e8c")
    assert (
        "the tokenizer cannot write 8 of the ground truths: '\u4e00\u4e8c' is read back as" in text
    )
    assert "check the reward" not in text


LR = "actor_rollout_ref.actor.optim.lr"


@pytest.mark.parametrize(
    ("settings", "note"),
    [
        ((f"{LR}=0",), f"note: {LR}=0 changes no weight. Set a rate above 0 to train."),
        (
            (f"{LR}_warmup_steps=20", "trainer.total_training_steps=10"),
            "but the run has 10: the learning rate ends at 48% of",
        ),
        ((f"{LR}_warmup_steps=9", "trainer.total_training_steps=10"), ""),
    ],
)
def test_a_learning_rate_that_the_run_never_has_gets_a_note(
    check: Check, settings: Sequence[str], note: str
) -> None:
    text = check(chats(*DIFFERENT), *settings)
    assert note in text
    assert ("note: " in text) == bool(note)
