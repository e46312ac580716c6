"""Checkpoints as run folders, addressed by the paths of the protocol.

    tinker://RUN/weights/NAME            <folder>/RUN/weights/NAME/global_step_N/actor
    tinker://RUN/sampler_weights/NAME    the same without optimizer

`export`, `chat` and `eval` take the folder `NAME` or a folder in it. `run.json` next to the two
folders describes the training run; `checkpoint.json` in `NAME` describes the checkpoint. A
restarted server reads these files.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

from pydantic import AfterValidator, ConfigDict, ValidationError

from trainer.run_folder.folder import write_marker
from trainer.serve.bodies import Body, JsonObject, Natural, Ttl, fault_of, page
from trainer.serve.pending import RequestError
from verl_like.errors import CheckpointError
from verl_like.files import replace_folder, write_atomic

logger = logging.getLogger(__name__)
SCHEME = "tinker://"
KINDS = {"weights": "training", "sampler_weights": "sampler"}
"""Maps a folder in a run's folder to the protocol's type of its checkpoints."""
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._:-]{0,127}")
"""Names that clients can choose. Work folders begin with a dot: `.NAME.part` and `.NAME.old`."""
SPILLED = "snapshots"
"""Folder of a run for snapshots that do not stay in memory."""


class SavedPath(NamedTuple):
    """The three parts of a checkpoint's path."""

    run: str
    kind: str
    name: str

    @classmethod
    def parse(cls, text: str) -> SavedPath:
        """Read `tinker://RUN/KIND/NAME`."""
        parts = text.removeprefix(SCHEME).split("/")
        if not text.startswith(SCHEME) or len(parts) != 3:
            raise RequestError(
                f"{text!r} is not a checkpoint path. Use the form {SCHEME}RUN/weights/NAME."
            )
        return cls.of(*parts)

    @classmethod
    def of(cls, run: str, kind: str, name: str) -> SavedPath:
        """Check the parts of a path; reject names that would leave the folder."""
        if kind not in KINDS:
            raise RequestError(f"{kind!r} is not a kind of checkpoint; valid: {', '.join(KINDS)}.")
        for part in (run, name):
            if not NAME.fullmatch(part):
                raise RequestError(
                    f"{part!r} cannot name a checkpoint or a run: use up to 128 letters, digits, "
                    "'_', '-', ':' and '.', and begin with a letter, a digit or '_'."
                )
        return cls(run, kind, name)

    def __str__(self) -> str:
        return f"{SCHEME}{self.run}/{self.kind}/{self.name}"


def _with_zone(text: str) -> str:
    if datetime.fromisoformat(text).tzinfo is None:
        raise ValueError("it has no time zone")
    return text


Time = Annotated[str, AfterValidator(_with_zone)]


class SavedRunInfo(Body):
    """The contents of `run.json`."""

    model_config = ConfigDict(extra="allow")
    base_model: str
    role: str = "actor"  # checkpoints of the first servers have no role
    rank: Natural
    frozen: list[str]

    @classmethod
    def read(cls, file: Path) -> Self | None:
        """Return the contents of a file, None if there is none; reject a damaged one."""
        try:
            return cls.model_validate_json(file.read_bytes())
        except FileNotFoundError:
            return None
        except ValidationError as error:
            raise CheckpointError(f"{file} is damaged: {fault_of(error)}. Delete it.") from error


class SavedCheckpoint(SavedRunInfo):
    """The contents of `checkpoint.json`."""

    num_steps: Natural
    time: Time
    expires_at: Time | None = None

    @property
    def is_over(self) -> bool:
        """True if the checkpoint has expired."""
        ends = self.expires_at
        return ends is not None and datetime.fromisoformat(ends) < datetime.now(UTC)


class ServedCheckpoints:
    """The checkpoints below one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._damaged: set[Path] = set()
        """Damaged files that were reported."""

    def place(self, path: SavedPath) -> Path:
        """Return the run folder of a checkpoint."""
        return self.folder / path.run / path.kind / path.name

    @contextmanager
    def writing(
        self, path: SavedPath, step: int, config: JsonObject, metadata: JsonObject
    ) -> Iterator[Path]:
        """Context in which a checkpoint is written to the returned folder, replacing an old one."""
        place = self.place(path)
        part = place.with_name(f".{place.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        inside = part / f"global_step_{step}"
        try:
            inside.mkdir(parents=True)
            yield inside
            write_marker(inside, step, config, {})
            size = sum(file.stat().st_size for file in part.rglob("*") if file.is_file())
            written = {**metadata, "time": datetime.now(UTC).isoformat(), "size_bytes": size}
            write_atomic(part / "checkpoint.json", json.dumps(written))
            replace_folder(part, place)
        finally:
            shutil.rmtree(part, ignore_errors=True)

    def find(self, path: SavedPath) -> JsonObject | None:
        """Return `checkpoint.json`; None if the checkpoint does not exist or has expired."""
        saved = SavedCheckpoint.read(self.place(path) / "checkpoint.json")
        return None if saved is None or saved.is_over else saved.model_dump()

    def metadata(self, path: SavedPath) -> JsonObject:
        """Return `checkpoint.json`; raise status 404 if there is no such checkpoint."""
        metadata = self.find(path)
        if metadata is None:
            raise RequestError(f"there is no checkpoint {path}.", 404)
        return metadata

    def change(self, path: SavedPath, **changes: Any) -> None:
        """Change entries of `checkpoint.json`."""
        metadata = {**self.metadata(path), **changes}
        write_atomic(self.place(path) / "checkpoint.json", json.dumps(metadata))

    def delete_expired(self) -> None:
        """Delete expired checkpoints, and report damaged ones once."""
        for file in self.folder.glob("*/*/*/checkpoint.json"):
            try:
                saved = SavedCheckpoint.read(file)
            except CheckpointError as error:
                if file not in self._damaged:
                    logger.warning("%s", error)
                self._damaged.add(file)
            else:
                if saved is not None and saved.is_over:
                    shutil.rmtree(file.parent, ignore_errors=True)

    def remove_leftovers(self) -> None:
        """Remove what a killed server left: unfinished and replaced checkpoints, and snapshots."""
        runs = self.folder.glob
        for work in [*runs("*:train:*/*/.*.part"), *runs("*:train:*/*/.*.old")]:
            place = work.with_name(work.stem[1:])
            if work.suffix == ".old" and not place.exists():
                work.rename(place)  # the server was killed between the two renames
            else:
                shutil.rmtree(work)
        for snapshots in runs(f"*:train:*/{SPILLED}"):
            shutil.rmtree(snapshots)

    def note_run(self, run: str, metadata: JsonObject) -> None:
        """Write `run.json` of a training run, whose folder has a checkpoint."""
        write_atomic(self.folder / run / "run.json", json.dumps(metadata))


class CheckpointHandlers:
    """List and describe checkpoints, and change or delete them."""

    def __init__(self, checkpoints: ServedCheckpoints) -> None:
        self.checkpoints, self.folder = checkpoints, checkpoints.folder

    def list_runs(self, limit: Natural = 100, offset: Natural = 0) -> JsonObject:
        """Return a page of the training runs, most recently saved first."""
        files = sorted(self.folder.glob("*/run.json"), key=lambda f: (-f.stat().st_mtime, str(f)))
        runs = [self.describe_run(file.parent.name) for file in files]
        return page("training_runs", runs, limit, offset)

    def describe_run(self, run: str) -> JsonObject:
        """Return a training run in the protocol's form."""
        file = self.folder / run / "run.json"
        saved = SavedRunInfo.read(file) if NAME.fullmatch(run) else None
        if saved is None:
            raise RequestError(f"there is no training run {run!r}.", 404)
        metadata = saved.model_dump()
        last = {saved["checkpoint_type"]: saved for saved in reversed(self.describe_all(run))}
        return {
            **metadata,
            "training_run_id": run,
            "model_owner": "local",
            "is_lora": metadata["rank"] > 0,
            "lora_rank": metadata["rank"] or None,
            "corrupted": False,
            "last_request_time": datetime.fromtimestamp(file.stat().st_mtime, UTC).isoformat(),
            "last_checkpoint": last.get("training"),
            "last_sampler_checkpoint": last.get("sampler"),
        }

    def describe_all(self, run: str | None = None) -> list[JsonObject]:
        """Return the checkpoints of one run or all runs, in the protocol's form, newest first."""
        checkpoints = []
        for file in self.folder.glob(f"{run or '*'}/*/*/checkpoint.json"):
            path = SavedPath(*file.parent.parts[-3:])
            try:
                metadata = self.checkpoints.find(path)
            except CheckpointError:  # the janitor reports it
                continue
            if path.kind in KINDS and NAME.fullmatch(path.name) and metadata:
                names = {"checkpoint_id": f"{path.kind}/{path.name}", "tinker_path": str(path)}
                names["checkpoint_type"] = KINDS[path.kind]
                checkpoints.append({"public": False, **metadata, **names})
        return sorted(checkpoints, key=lambda checkpoint: checkpoint["time"], reverse=True)

    def list_all(self, limit: Natural = 100, offset: Natural = 0) -> JsonObject:
        """Return a page of all checkpoints."""
        return page("checkpoints", self.describe_all(), limit, offset)

    def list_of_run(self, run: str) -> JsonObject:
        """Return the checkpoints of one run."""
        self.describe_run(run)
        return {"checkpoints": self.describe_all(run)}

    def weights_info(self, tinker_path: str) -> JsonObject:
        metadata = self.checkpoints.metadata(SavedPath.parse(tinker_path))
        return {
            "base_model": metadata["base_model"],
            "is_lora": metadata["rank"] > 0,
            "lora_rank": metadata["rank"] or None,
            **{f"train_{p}": p not in metadata["frozen"] for p in ("mlp", "attn", "unembed")},
        }

    def delete(self, run: str, kind: str, name: str) -> None:
        """Remove a checkpoint."""
        place = self.checkpoints.place(SavedPath.of(run, kind, name))
        if not (place / "checkpoint.json").is_file():
            raise RequestError(f"there is no checkpoint {run}/{kind}/{name}.", 404)
        shutil.rmtree(place)

    def publish(self, run: str, kind: str, name: str) -> None:
        self.checkpoints.change(SavedPath.of(run, kind, name), public=True)

    def unpublish(self, run: str, kind: str, name: str) -> None:
        self.checkpoints.change(SavedPath.of(run, kind, name), public=False)

    def set_ttl(self, run: str, kind: str, name: str, ttl_seconds: Ttl = None) -> None:
        self.checkpoints.change(SavedPath.of(run, kind, name), expires_at=expiry(ttl_seconds))


def expiry(ttl_seconds: int | None) -> str | None:
    """Return the time when a checkpoint expires; None if it never does."""
    if ttl_seconds is None:
        return None
    return (datetime.now(UTC) + timedelta(seconds=ttl_seconds)).isoformat()
