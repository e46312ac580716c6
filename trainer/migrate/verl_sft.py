"""Translate a command of verl's SFT trainers to `verl-like sft`; `verl_sft.yaml` has the keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trainer.migrate.flags import GivenFlags, Table, as_flags
from trainer.migrate.translation import Translation
from trainer.ppo.verl import with_trackers


def translate_sft(program: str, launcher: Sequence[str], given: Mapping[str, str]) -> Translation:
    """Return our settings, and a line on every key."""
    which = "fsdp_sft_trainer" if program == "fsdp_sft_trainer" else "sft_trainer"
    started = {name.replace("_", "-"): values for name, values in as_flags(launcher).items()}
    figures: dict[str, int | str] = {}
    for figure, flag, key in (
        ("nodes", "nnodes", "trainer.nnodes"),
        ("gpus", "nproc-per-node", "trainer.n_gpus_per_node"),
    ):
        text = "".join(started.get(flag, [])[:1]) or given.get(key, "1")
        figures[figure] = int(text) if text.isdigit() else text
    keys = GivenFlags(
        Table("verl_sft", which, "all"),
        {key: [value] for key, value in given.items()},
        f"verl's {which} has no key",
        Translation("sft"),
        dashes="",
        figures=figures,
    )
    here, _ = with_trackers(keys.value("trainer.logger", "[console,wandb]"))
    keys.becomes("trainer.logger", {"trainer.logger": here})
    keys.done.default("trainer.logger", "[console,wandb]", {"trainer.logger": here})
    return keys.finish()
