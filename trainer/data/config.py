"""The section `data`: files of prompts, prompts per step, their lengths, and when to validate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainer.config.schema import TrainerConfig
from verl_like.config_key import ReadWhen, Section, config_field, when
from workers.config import UserCodeConfig
from workers.config.conditions import VALIDATION_IS_ON

NO_FILES = "there are no data.val_files"
CAN_VALIDATE_LATER = ReadWhen(
    "there are `data.val_files`",
    lambda trainer, run: bool(run.data.val_files) or trainer.test_freq <= 0,
    NO_FILES,
)
CAN_VALIDATE_BEFORE = ReadWhen(
    "there are `data.val_files`",
    lambda trainer, run: bool(run.data.val_files) or not trainer.val_before_train,
    NO_FILES,
)


@dataclass(kw_only=True)
class DataConfig(Section):
    """The prompts: their files, number per step, lengths and order."""

    train_files: Any = config_field(
        "",
        allows="a file, a list, or a number",
        required="set a parquet, JSONL or CSV file, or a list of files",
    )
    """Files in verl's schema (Parquet, JSONL, CSV), data sets of the Hugging Face Hub, or, if the
    environment makes its prompts, the number of prompts per epoch.
    """
    val_files: Any = config_field(
        "",
        allows="a file, a list, or a number",
        read_when=VALIDATION_IS_ON,
        may_change_on_resume=True,
    )
    """Validation data, like `train_files`; an empty value disables validation."""
    custom_cls: UserCodeConfig = config_field(factory=UserCodeConfig)
    """Function or class that yields your data set, given `data_files`, `tokenizer`, `config`."""
    prompt_key: str = config_field("prompt", allows="a column")
    """Column of the prompts."""
    image_key: str | None = config_field("images", allows="a column or null")
    """Column of a prompt's images, next to `images` and `image`. null: columns and the marker
    `<image>` are not read.
    """
    train_batch_size: int = config_field(1024, above=0)
    """Prompts per step."""
    total_prompts: int | None = config_field(
        None,
        above=0,
        hint="or null for a run of steps or epochs",
        may_change_on_resume=True,
    )
    """Prompts of the whole run; null: as many as its steps or epochs need."""
    max_prompt_length: int = config_field(512, above=0)
    """Longest prompt in tokens."""
    max_response_length: int = config_field(512, above=0)
    """Longest response in tokens."""
    shuffle: bool = config_field(
        True, read_when=when("sampler", None, otherwise="data.sampler sets the order")
    )
    """Shuffle the prompts in each epoch, seeded by `trainer.seed`."""
    sampler: str | None = config_field(None, allows="a dotted path")
    """Dotted path of your function that orders the prompts of an epoch."""
    filter_overlong_prompts: bool = config_field(False)
    """Drop prompts longer than `max_prompt_length`."""
    truncation: str = config_field("error", choices=("error", "left", "right"))
    """Overlong prompts, if they are not dropped. `error`: stop the run; `left`, `right`: truncate
    them on that side.
    """
    apply_chat_template_kwargs: dict[str, Any] = config_field(factory=dict, allows="variables")
    """Variables of the chat template, such as {enable_thinking: false}."""
    on_bad_row: str = config_field("error", choices=("error", "skip"))
    """Invalid rows. `error`: stop the run; `skip`: leave them out and count them."""


@dataclass(kw_only=True)
class ValidatingTrainerConfig(TrainerConfig):
    """Section `trainer` of a recipe that validates on `data.val_files`."""

    test_freq: int = config_field(0, at_least=-1, read_when=CAN_VALIDATE_LATER)
    """Steps between validations; 0: only after the last step, -1: not even then."""
    val_before_train: bool = config_field(True, read_when=CAN_VALIDATE_BEFORE)
    """Validate before step 1; a run that resumes after it does not."""
