"""What `gpu.sh` and `gpu_node.sh` run: parts with deadlines, commands, and what is kept of them.

    for part in parts(Machine(num_cards=8), folder):
        part.name, part.limit_s, part.command, part.keep

There is a list for one card and one for several, of which half generate where a pool does that
alone. Of each run the second and third step count.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gpu_figures as keep

HERE = Path(__file__).resolve().parent
GRACE_S = 5
"""From the deadline of a part to the end of its processes."""
FLASH = "flash_attn or flash_attn_interface"
"""FlashAttention 2 and 4, or 3."""
INSTALL = {
    "vllm": "pip install 'verl-like[vllm]'",
    FLASH: "pip install --no-build-isolation 'verl-like[flash-attn]'",
    "peft": "pip install 'verl-like[lora]'",
    "ray": "pip install ray",
}
"""Module that a part may need -> how to have it."""
ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"
ACTOR = "actor_rollout_ref.actor"
LORA = (f"{MODEL}.lora_rank=32", f"{MODEL}.dtype=bfloat16")
"""With weights of 16 bits a 7B policy, its critic and an engine fit one card of 80 GB."""
GRPO = ("algorithm=grpo",)
PPO = ("algorithm=ppo", "critic.model.enable_gradient_checkpointing=true")


def is_installed(module: str) -> bool:
    """Whether this interpreter has it, or one of several: a or b."""
    return any(find_spec(each) for each in module.split(" or "))


@dataclass(frozen=True)
class Machine:
    """Where the parts run, and how."""

    num_cards: int
    device: str = "cuda"
    is_tiny: bool = False
    """Models and rows of a trial on a CPU."""
    backend: str = "local"
    engine: str = "native"
    """Of runs that are about something else."""

    @classmethod
    def of(cls, chosen: argparse.Namespace) -> Machine:
        """With what is installed: Ray for several cards, vLLM on cards."""
        on_cards = chosen.device == "cuda"
        has_vllm = on_cards and (chosen.dry_run is not None or is_installed("vllm"))
        has_ray = chosen.cards > 1 and is_installed("ray")
        backend = chosen.backend or ("ray" if has_ray else "local")
        engine = "vllm" if has_vllm else "native"
        return cls(chosen.cards, chosen.device, chosen.tiny, backend, engine)


@dataclass(frozen=True)
class Run:
    """A run of three steps."""

    recipe: str
    model: Path
    settings: tuple[str, ...]
    prompts: int
    samples: int
    cards: int
    """Those that generate."""
    engine: str
    engine_cards: int = 1
    prompt: int = 512
    response: int = 512

    @property
    def rows_of_engine(self) -> int:
        """Samples that an engine draws together."""
        return self.prompts * self.samples * self.engine_cards // self.cards

    def keys(self, machine: Machine) -> list[str]:
        """The settings of its command."""
        tokens = self.prompt + self.response if machine.is_tiny else 16384
        of_vllm = (
            f"{ROLLOUT}.gpu_memory_utilization=0.4",
            f"{ROLLOUT}.tensor_model_parallel_size={self.engine_cards}",
        )
        return [
            f"{MODEL}.path={self.model}",
            f"{MODEL}.enable_gradient_checkpointing=true",
            f"data.train_files={self.model.parent}/prompts_{self.prompt}.parquet",
            f"data.max_prompt_length={self.prompt}",
            f"data.max_response_length={self.response}",
            f"data.train_batch_size={self.prompts}",
            f"custom_reward_function.path={HERE / 'gpu_reward.py'}",
            "custom_reward_function.name=last_digit",
            *self.settings,
            f"{ACTOR}.ppo_mini_batch_size={self.prompts}",
            f"{ACTOR}.ppo_max_token_len_per_gpu={tokens}",
            f"{ROLLOUT}.n={self.samples}",
            f"{ROLLOUT}.name={self.engine}",
            *(of_vllm if self.engine == "vllm" else ()),
            f"trainer.device={machine.device}",
            f"trainer.backend={machine.backend}",
            f"trainer.n_gpus_per_node={machine.num_cards}",
            "trainer.total_training_steps=3",
            "trainer.save_final=false",
            "trainer.save_every_minutes=null",
            "trainer.max_restarts=0",
            "trainer.logger=[console]",
        ]


@dataclass(frozen=True)
class Part:
    """A command in a process of its own."""

    name: str
    limit_s: int
    command: tuple[str, ...]
    """Arguments of Python; {part} is the part's own folder."""
    keep: Callable[..., keep.Figures]
    """(folder, card) -> figures."""
    needs: tuple[str, ...] = ()
    """Modules without which it is skipped."""
    on_cards_alone: bool = False
    reads_models: bool = False
    run: Run | None = None


@dataclass
class Outcome:
    """What became of a part."""

    name: str
    result: str
    """ok, FAILED, LATE or skipped."""
    seconds: float = 0.0
    why: str = ""
    figures: keep.Figures = field(default_factory=dict)
    command: str = ""

    @property
    def is_bad(self) -> bool:
        """Whether the exit code tells of it."""
        return self.result in ("FAILED", "LATE")

    @property
    def said(self) -> str:
        """Why there is nothing to tell, or the figures."""
        figures = [f"{name} {short(value)}" for name, value in self.figures.items()]
        return "; ".join(filter(None, [self.why, ", ".join(figures)]))


def short(value: float | str) -> str:
    """Three digits of a number."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


@dataclass(frozen=True)
class Makes:
    """Parts of the kinds that there are, on this machine."""

    machine: Machine
    models: Path

    def script(self, name: str, limit_s: int, *words: str, **more: Any) -> Part:
        """A file beside this one, which gets the device."""
        file, *arguments = words
        tiny = ("--tiny",) if self.machine.is_tiny else ()
        device = ("--device", self.machine.device)
        command = (str(HERE / file), *arguments, *device, *tiny)
        return Part(name, limit_s, command, **more)

    def side(
        self, name: str, limit_s: int, part: str, model: str, *words: str, **more: Any
    ) -> Part:
        """A part of `gpu_side.py`."""
        command = ("gpu_side.py", part, str(self.models / model), "--out", "{part}/figures.json")
        of_side = {"keep": keep.written, "reads_models": True}
        return self.script(name, limit_s, *command, *words, **of_side, **more)

    def run(
        self, name: str, limit_s: int, size: str, settings: tuple[str, ...], **more: Any
    ) -> Part:
        """A run of `verl-like ppo`, or of another recipe."""
        of_part = {key: more.pop(key) for key in ("needs", "on_cards_alone") if key in more}
        of_part["reads_models"] = True
        own = {"recipe": "ppo", "prompts": 64, "samples": 8, "cards": self.machine.num_cards}
        own |= {"engine": self.machine.engine, "model": self.models / size, "settings": settings}
        run = Run(**own | more)
        if self.machine.is_tiny:
            run = replace(run, prompts=8, samples=2, prompt=16, response=8)
        where = "trainer.default_local_dir={part}/run"
        command = ("-P", "-m", "trainer.cli.main", run.recipe, *run.keys(self.machine), where)
        return Part(name, limit_s, command, partial(keep.of_run, run), run=run, **of_part)


def parts(machine: Machine, folder: Path) -> list[Part]:
    """Of one card or of several, in their order; models are made in `folder`."""
    makes = Makes(machine, folder / "models")
    limits = ON_ONE if machine.num_cards == 1 else ON_SEVERAL
    doctor = ("-P", "-m", "trainer.cli.main", "doctor")
    tests = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", "tests/workers")
    report = "--junitxml={part}/tests.xml"
    return [
        Part("doctor", 90, doctor, keep.of_doctor, needs=("ray",)),
        makes.script(MODELS, 60, "gpu_models.py", str(makes.models), keep=keep.none),
        Part("gpu tests", limits, (*tests, report), keep.of_tests, on_cards_alone=True),
        *(of_one_card(makes) if machine.num_cards == 1 else of_several(makes)),
    ]


MODELS = "models"
"""The part that the later ones need."""
ON_ONE, ON_SEVERAL = 150, 100
"""Seconds for the gpu tests."""


def of_one_card(makes: Makes) -> Iterator[Part]:
    """Kernels, engines, whole steps of 0.5B, and of 7B with adapters."""
    offload = ("--strategy", "fsdp+offload")
    yield makes.side("update 1.5B, torch's varlen", 50, "update", "1.5b", "--attention", "torch")
    yield makes.side("update 1.5B, flash-attn", 50, "update", "1.5b", needs=(FLASH,))
    yield makes.side("update 1.5B, offloaded", 60, "update", "1.5b", *offload, on_cards_alone=True)
    yield makes.side("decode 0.5B", 50, "decode", "0.5b")
    yield makes.run("GRPO 0.5B, native", 80, "0.5b", GRPO, engine="native", samples=4)
    yield makes.run(
        "GRPO 0.5B, vLLM that sleeps", 110, "0.5b", GRPO, engine="vllm", samples=4, needs=("vllm",)
    )
    yield makes.run("PPO 0.5B", 100, "0.5b", PPO, samples=4)
    small = {"prompts": 32, "samples": 4, "needs": ("peft",)}
    yield makes.run("GRPO 7B, LoRA", 140, "7b", (*GRPO, *LORA), **small)
    of_critic = "critic.model.lora_rank=32"
    yield makes.run("PPO 7B, LoRA", 140, "7b", (*PPO, *LORA, of_critic), **small)


def of_several(makes: Makes) -> Iterator[Part]:
    """FSDP2 over all cards, and every way to share them out."""
    half = makes.machine.num_cards // 2
    yield makes.side("update 1.5B, one card", 50, "update", "1.5b")
    yield makes.side("decode 0.5B, one card", 40, "decode", "0.5b")
    yield makes.run("GRPO 7B, FSDP2 over all", 150, "7b", GRPO)
    yield makes.run("PPO 7B, critic apart", 145, "7b", (*PPO, "placement=split"), cards=half)
    apart = (
        "role_mapping.rollout=rollout_pool",
        f"resource_pool_spec.rollout_pool=[{half}]",
    )
    yield makes.run("GRPO 7B, rollout apart: NCCL sync", 125, "7b", (*GRPO, *apart), cards=half)
    yield makes.run(
        "GRPO 1.5B, vLLM with tp 2", 110, "1.5b", GRPO,
        engine="vllm", engine_cards=2, needs=("vllm",),
    )  # fmt: skip
    offload = f"{ACTOR}.strategy=fsdp+offload"
    yield makes.run("GRPO 7B, offloaded", 130, "7b", (*GRPO, offload), on_cards_alone=True)
    detached = (
        *GRPO,
        "detached.makers=1",
        f"detached.trainers={half}",
        f"resource_pool_spec.maker_0_pool=[{half}]",
    )
    yield makes.run(
        f"detached 7B, {half} + {half}", 140, "7b", detached, recipe="detached", cards=half
    )
