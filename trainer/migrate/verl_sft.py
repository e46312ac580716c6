"""A command of verl's SFT trainers in settings of `verl-like sft`; `verl_sft.yaml` has the keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trainer.config.settings import parse
from trainer.migrate.command import as_flags
from trainer.migrate.given import GivenFlags
from trainer.migrate.table import Table
from trainer.migrate.translation import Translation
from verl_like.errors import ConfigError


def translate_sft(program: str, launcher: Sequence[str], given: Mapping[str, str]) -> Translation:
    """Settings, and a word on every key."""
    which = "fsdp_sft_trainer" if program == "fsdp_sft_trainer" else "sft_trainer"
    flags = {key: [value] for key, value in given.items()}
    unknown = f"verl's {which} has no key"
    keys = GivenFlags(
        Table("verl_sft", "all", which), flags, unknown, Translation("sft"), dashes=""
    )
    started = {name.replace("_", "-"): values for name, values in as_flags(launcher).items()}
    nodes = "".join(started.get("nnodes", [])[:1]) or keys.value("trainer.nnodes", "1")
    cards = "".join(started.get("nproc-per-node", [])[:1])
    cards = cards or keys.value("trainer.n_gpus_per_node", "1")
    processes = {"trainer.nnodes": nodes, "trainer.n_gpus_per_node": cards}
    keys.done.rename("the processes that torchrun starts", processes)
    if which == "fsdp_sft_trainer":
        _columns(keys)
        by_rows = {"data.use_dynamic_bsz": False}
        keys.done.default("passes of as many tokens", "none", by_rows)
        share = "0.1"
        if keys.has("data.micro_batch_size"):
            if not (nodes.isdigit() and cards.isdigit()):
                raise ConfigError(
                    f"data.micro_batch_size counts the rows of all processes, and their number is "
                    f"{nodes} x {cards}: give the script its arguments."
                )
            rows = keys.count("data.micro_batch_size") // max(int(nodes) * int(cards), 1)
            keys.becomes("data.micro_batch_size", {"data.micro_batch_size_per_gpu": max(rows, 1)})
    else:
        share = "0.0"
        if keys.has("optim.min_lr"):
            ratio = keys.number("optim.min_lr") / keys.number("optim.lr")
            keys.becomes("optim.min_lr", {"optim.min_lr_ratio": f"{ratio:g}"})
    if not keys.has("optim.lr_warmup_steps"):
        share = keys.value("optim.lr_warmup_steps_ratio", share)
        warm_up = {"optim.lr_warmup_steps": -1, "optim.lr_warmup_steps_ratio": share}
        keys.becomes_or_is("optim.lr_warmup_steps_ratio", share, warm_up)
    _run(keys)
    return keys.finish()


def _columns(keys: GivenFlags) -> None:
    """Rows have the columns `messages`, or `prompt` and `response`."""
    if keys.is_on("data.multiturn.enable"):
        return
    names = (
        "data.prompt_key",
        "data.response_key",
        "data.prompt_dict_keys",
        "data.response_dict_keys",
    )
    found = [keys.value(name) for name in names]
    if found != ["prompt", "response", "", ""]:
        told = ", ".join(f"{name}={keys.value(name)}" for name in names if keys.has(name))
        keys.done.absent.append(
            f"{told or 'data.prompt_key=question, data.response_key=answer'}: rows have the "
            "columns prompt and response; write the file so first (a file without them is refused)"
        )


def _run(keys: GivenFlags) -> None:
    """Trackers; verl validates after its epochs alone, and means over the tokens of each pass."""
    found = parse(f"x={keys.value('trainer.logger', '[console,wandb]')}").value()
    names = found if isinstance(found, list) else [found]
    here = [name for name in names if name in ("console", "tensorboard", "wandb", "mlflow")]
    keys.becomes_or_is("trainer.logger", "[console,wandb]", {"trainer.logger": here})
    keys.done.default("validation before training", "none", {"trainer.val_before_train": False})
    keys.done.always.append("a batch's loss is the mean over its tokens, whatever its passes are")
