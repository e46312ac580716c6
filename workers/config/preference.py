"""The workers' part of preference training, on top of a supervised recipe: loss and reference."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from verl_like.config_key import Section, When, entry_takes, key, unless
from verl_like.registry import registry_of
from workers.config.model import FrozenFSDPConfig
from workers.config.rows import RowWorkerConfig


def loss_reads(run: Any, name: str) -> bool:
    """True if the loss of this run has a parameter of that name."""
    loss = registry_of("preference loss").look_up(run.loss)
    return name in inspect.signature(loss).parameters


def has_reference(run: Any) -> bool:
    """True if the loss of this run compares with a reference."""
    return loss_reads(run, "ref_log_probs") and not run.reference_free


def takes(name: str) -> When:
    """Return the condition that the loss has a parameter of that name."""
    return entry_takes(name, "preference loss", "loss")


LEARNS_PAIRS = When(
    "the loss learns pairs",
    lambda _, run: not loss_reads(run, "desirable"),
    "the loss learns rows with a label, not pairs",
)
HAS_REFERENCE = When(
    "the loss has a reference",
    lambda _, run: has_reference(run),
    "the loss has no reference",
)
MAY_BE_REFERENCE_FREE = When(
    "the loss compares pairs with a reference",
    lambda _, run: loss_reads(run, "ref_log_probs") and not loss_reads(run, "desirable"),
    "the loss compares no pairs with a reference",
)
REFERENCE_IS_APART = unless("ref.model.path")


@dataclass(kw_only=True)
class ReferenceModelConfig(Section):
    """The weights of the reference model."""

    path: str | None = key(None, allows="a folder or a name", hint="or null")
    """Model folder or hub name, with the tokenizer of `model.path`; null: the initial model."""


@dataclass(kw_only=True)
class ReferenceConfig(Section):
    """The frozen model that the loss compares with; other settings are those of `model`."""

    model: ReferenceModelConfig = key(factory=ReferenceModelConfig)
    """The model."""
    fsdp_config: FrozenFSDPConfig = key(factory=FrozenFSDPConfig, read_when=REFERENCE_IS_APART)
    """Sharding."""


@dataclass(kw_only=True)
class PreferenceWorkerConfig(RowWorkerConfig):
    """The part of the tree that the workers read."""

    loss: str = key("dpo", registry="preference loss")
    """Preference loss."""
    beta: float = key(0.1, above=0, read_when=takes("beta"))
    """Scale of log-ratios; the SimPO paper uses 2 and more."""
    label_smoothing: float = key(0.0, at_least=0, below=0.5, read_when=takes("label_smoothing"))
    """Assumed share of swapped pairs."""
    simpo_gamma: float = key(0.5, at_least=0, read_when=takes("simpo_gamma"))
    """simpo's target margin of rewards."""
    orpo_lambda: float = key(0.1, at_least=0, read_when=takes("orpo_lambda"))
    """Weight of the odds ratio, next to the SFT loss."""
    desirable_weight: float = key(1.0, at_least=0, read_when=takes("desirable_weight"))
    """Weight of good responses."""
    undesirable_weight: float = key(1.0, at_least=0, read_when=takes("undesirable_weight"))
    """Weight of bad responses."""
    sft_coef: float = key(0.0, at_least=0, read_when=LEARNS_PAIRS)
    """Weight of the SFT loss of the chosen response."""
    reference_free: bool = key(False, read_when=MAY_BE_REFERENCE_FREE)
    """Use a uniform reference instead of a model."""
    ref: ReferenceConfig = key(factory=ReferenceConfig, read_when=HAS_REFERENCE)
    """Reference."""
