"""Data sets by their name on the Hugging Face hub, kept in this machine's cache of it.

    hub://openai/gsm8k/main:train       organisation/name, a folder of it, a split
    Dahoas/rm-static:test               the same without hub://, where there is no such file

Behind such a name are files: parquet and JSONL, of the repository or, where it has none, of the
parquet that the hub makes of every data set. What was fetched once is found without a network.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from verl_like.errors import ConfigError, nearest

SCHEME = "hub://"
NAME = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(?P<folder>(/[\w.-]+)*)(:(?P<split>[\w.-]+))?")
ENDINGS = (".parquet", ".jsonl", ".jsonl.gz")
MADE_BY_THE_HUB = "refs/convert/parquet"
SHARD = re.compile(r"-(\d{5})-of-(\d{5})(-[0-9a-f]+)?$")


def is_hub_name(name: str) -> bool:
    """Whether it names a data set of the hub: by hub://, or as what can be no file here."""
    if name.startswith(SCHEME):
        return True
    is_file = name.endswith((*ENDINGS, ".json")) or Path(name).expanduser().parent.exists()
    return not is_file and NAME.fullmatch(name) is not None


def hub_files(name: str, key: str) -> list[Path]:
    """The files of one split, in order; the configuration's `key` has that name."""
    found = NAME.fullmatch(name.removeprefix(SCHEME))
    if found is None:
        raise ConfigError(
            f"{key}={name} names no data set; write {SCHEME}organisation/name, then /folder and "
            ":split where it has several."
        )
    folder, split = found["folder"].strip("/"), found["split"]
    files = _data_files(_fetch(found["name"], None, folder, split, f"{key}={name}"), folder)
    if not files:
        with suppress(ConfigError):
            root = _fetch(found["name"], MADE_BY_THE_HUB, folder, split, f"{key}={name}")
            files = _data_files(root, folder)
    if not files:
        which = f" of the split {split}" if split else ""
        where = f" in its folder {folder}" if folder else ""
        raise ConfigError(
            f"{key}={name}: the data set has no file{which}{where} that ends in "
            f"{', '.join(ENDINGS)}. Its page on the hub shows its folders and splits."
        )
    return _one_split(files, split, f"{key}={name}")


@dataclass(frozen=True)
class _DataFile:
    """A file of a data set, and what its name says of it."""

    path: Path
    folder: str
    """Where it lies in the repository, without the split."""
    split: str
    num_shards: int

    @classmethod
    def of(cls, path: Path, root: Path) -> _DataFile | None:
        """None: it has no rows that can be read."""
        ending = next((ending for ending in ENDINGS if path.name.endswith(ending)), None)
        if ending is None:
            return None
        stem, folder = path.name.removesuffix(ending), path.relative_to(root).parent
        shard = SHARD.search(stem)
        split = SHARD.sub("", stem)
        if split.isdigit() and folder.name:  # train/0000.parquet
            split, folder = folder.name, folder.parent
        return cls(path, folder.as_posix(), split, int(shard[2]) if shard else 1)


def _data_files(root: Path, folder: str) -> list[_DataFile]:
    """The files with rows in a folder of the repository, or below it, in order."""
    found = [_DataFile.of(path, root) for path in sorted((root / folder).rglob("*"))]
    return [file for file in found if file is not None]


def _one_split(files: Sequence[_DataFile], split: str | None, setting: str) -> list[Path]:
    """The files of that split, or of the only one, complete and of one folder."""
    splits = sorted({file.split for file in files})
    if split is None and len(splits) > 1:
        raise ConfigError(f"{setting}: say which split, by a : and one of {', '.join(splits)}.")
    split = split or splits[0]
    chosen = [file for file in files if file.split == split]
    if not chosen:
        raise ConfigError(
            f"{setting}: there is no split {split!r}, only {', '.join(splits)}."
            f"{nearest(split, splits)}"
        )

    folders = sorted({file.folder for file in chosen})
    if len(folders) > 1:
        raise ConfigError(
            f"{setting}: the split {split} is in several folders; put one behind the name, with "
            f"a /: {', '.join(folders)}."
        )
    if len(chosen) < chosen[0].num_shards:
        raise ConfigError(
            f"{setting}: {len(chosen)} of {chosen[0].num_shards} files of the split {split} are "
            "in this machine's cache, and the hub does not give the others; try again when it is "
            "reachable."
        )
    return [file.path for file in chosen]


def _fetch(name: str, revision: str | None, folder: str, split: str | None, setting: str) -> Path:
    """The cached folder of a data set with at least the files asked for, if the hub has them."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    start = f"{folder}/*" if folder else "*"
    wanted = [f"{start}{split or ''}*{ending}" for ending in ENDINGS]
    try:
        return Path(
            snapshot_download(name, repo_type="dataset", revision=revision, allow_patterns=wanted)
        )
    except (OSError, ValueError, HfHubHTTPError) as error:
        raise ConfigError(
            f"{setting}: it is no file here, and the Hugging Face hub does not give it: "
            f"{' '.join(str(error).split())[:300]}"
        ) from error
