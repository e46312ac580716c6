"""A recipe as the configuration sees it: the base class of its schema, and its other declarations.

A recipe extends `RunConfig` (the run, its cluster, its pools and roles) with its own sections
(PPO's are in `trainer.ppo.config`). The dataclasses declare the defaults and, by `config_field`,
the rules of single fields. A recipe's YAML file has the classes of its roles, and values that refer
to another key.

    SFT = Recipe(
        name="sft", schema=SFTConfig, config_dir=Path(__file__).parent, config_name="sft_trainer",
        placements=placement_presets({"model_pool": ["actor"], "judge_pool": ["judge"]}),
    )
    config = load_config(["data.train_files=x"], SFT)

The YAML begins with `defaults: [sft_schema, placement: colocate, _self_]`. A recipe passes
knowledge of its algorithm as callables: `trainer.config` knows no algorithm.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar

from verl_like.calls.deadlines import Deadlines
from verl_like.config_key import ReadWhen, Section, config_field, unless, when
from verl_like.errors import ConfigError
from verl_like.registry import CallSignature, Registry, check_call, check_method
from workers.config.conditions import SAVES

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

ON_RAY = when("trainer.backend", "ray")
SEVERAL_POOLS = ReadWhen(
    "there are several pools, or a pool has `labels`",
    lambda _, run: (
        len(run.resource_pool_spec) > 1 or any(pool.labels for pool in run.pool_resources.values())
    ),
    "this run has one pool, which trainer.device and cpus_per_process describe",
)
JOINS_A_CLUSTER = unless("address")
NAME_A_FOLDER = "name the folder that the run writes into"
MOVED_MODULES = {
    "workers.roles.preference": "workers.roles.rows",
    "workers.roles.teacher": "workers.roles.reference",
}
"""Modules of role classes that have moved, as configurations of earlier runs name them."""


def where_it_is_now(worker: str) -> str:
    """Return the dotted path of a role's class, which may be that of an earlier version."""
    module, _, name = worker.rpartition(".")
    return f"{MOVED_MODULES[module]}.{name}" if module in MOVED_MODULES else worker


def check_tracker(tracker: Any, subject: str) -> None:
    """Reject an object that cannot make a tracker, or a tracker class without its two methods."""
    check_call(tracker, subject, CallSignature("config", "total_steps"))
    if isinstance(tracker, type):
        check_tracker_methods(tracker, subject)


def check_tracker_methods(tracker: Any, subject: str) -> None:
    """Reject a class or an object without a tracker's methods."""
    for name, call in (("write", CallSignature("metrics", "step")), ("close", CallSignature())):
        if not hasattr(tracker, name):
            raise ConfigError(
                f"{subject} has no {name}: a tracker has write(metrics, step) and close()."
            )
        check_method(tracker, name, subject, call)
    if hasattr(tracker, "write_samples"):
        check_method(tracker, "write_samples", subject, CallSignature("name", "rows", "step"))


TRACKERS: Registry[Any] = Registry("tracker", check_tracker, "(config, total_steps) -> Tracker")
"""Names for `trainer.logger`.

    @TRACKERS.register("print")
    class PrintTracker:
        def __init__(self, config, total_steps): ...
        def write(self, metrics, step): print(step, metrics["critic/score/mean"])
        def close(self): ...

`console`, `tensorboard`, `trackio` and `wandb` are built in.
"""
for _built_in in ("console", "tensorboard", "trackio", "wandb"):
    TRACKERS.register(_built_in)(_built_in)  # `trainer.run_folder.tracking` has their classes


@dataclass(kw_only=True)
class TrainerConfig(Section):
    """Length, devices, checkpoints and logging of the run."""

    may_change_on_resume = True
    cls: str = config_field(
        "",
        allows="a dotted path",
        required="set the dotted path of the trainer's class",
        may_change_on_resume=False,
    )
    """Trainer class: the recipe's or a subclass."""
    total_epochs: int | None = config_field(
        None, above=0, hint="or null for one epoch, or as many as total_training_steps needs"
    )
    """Passes over the data; null: one, or as many as `total_training_steps` needs."""
    total_training_steps: int | None = config_field(
        None, above=0, hint="or null for epochs x batches"
    )
    """Steps of the run; null: as many as `total_epochs` has."""
    stop_at: dict[str, float] = config_field(factory=dict, allows="{metric: value}")
    """Targets: the run ends when one of these metrics is at least its target."""
    nnodes: int = config_field(1, above=0)
    """Number of nodes (machines)."""
    n_gpus_per_node: int = config_field(1, above=0)
    """Devices per node (process slots on CPUs)."""
    backend: str = config_field("ray", choices=("ray", "local"))
    """`ray`: processes of a Ray cluster; `local`: this machine, without Ray (on GPUs, only pools of
    one process).
    """
    device: str = config_field("auto", choices=("auto", "cpu", "cuda"), elsewhere={"gpu": "cuda"})
    """`auto`: GPUs if there are any, otherwise CPUs."""
    threads_per_process: int | None = config_field(
        None, above=0, hint="or null to choose it at the start", may_change_on_resume=False
    )
    """CPU threads with which torch computes in each worker process. null: the cores (at most
    OMP_NUM_THREADS, if it is set) divided by the node's worker processes; on GPUs, and if no model
    has 5 million weights, 1. A resumed or replayed run keeps its number, because the bits of sums
    can depend on it.
    """
    seed: int = config_field(1, at_least=0, may_change_on_resume=False)
    """Seed of data order, sampling and new heads."""
    project_name: str = config_field("verl_like", allows="a name")
    """Project in W&B and trackio; first part of the default run folder."""
    experiment_name: str = config_field("run", allows="a name")
    """Name of the run in W&B and trackio; second part of the default run folder."""
    default_local_dir: str = config_field(
        "runs/verl_like/run", allows="a folder", required=NAME_A_FOLDER
    )
    """Folder of the run: its metrics, checkpoints, samples and report. `s3://bucket/folder` and the
    like are uploaded in the background.
    """
    test_freq: int = config_field(0, at_least=-1)
    """Steps between validations; 0: only after the last step, -1: not even then."""
    val_before_train: bool = config_field(True)
    """Validate before step 1; a run that resumes after it does not."""
    dry_run: bool = config_field(False)
    """Check the run, print the plan and stop (`verl-like check`)."""
    simulate: str | None = config_field(
        None, allows="number and GPU, such as 8xH100", read_when=when("dry_run", True)
    )
    """Check as if all nodes together had these GPUs; sets dry_run (`check --gpus`)."""
    save_freq: int = config_field(-1, at_least=-1)
    """Steps between checkpoints; 0: only after the last step, -1: none by steps."""
    save_every_minutes: float | None = config_field(
        30.0, above=0, hint="or null to disable timed checkpoints"
    )
    """Minutes between checkpoints; null disables timed checkpoints. A run that lasts longer also
    saves its last step.
    """
    save_final: bool = config_field(True)
    """Save the final model in Hugging Face format."""
    max_ckpt_to_keep: int | None = config_field(
        2,
        at_least=1,
        hint="or null to keep all",
        read_when=SAVES,
        verl="trainer.max_actor_ckpt_to_keep",
    )
    """Newest checkpoints to keep, in addition to the best one; null keeps all."""
    async_save: bool = config_field(
        True, read_when=SAVES, verl="actor_rollout_ref.actor.checkpoint.async_save"
    )
    """Write checkpoint files of 16 MiB or more in the background."""
    max_restarts: int = config_field(3, at_least=0)
    """Maximum automatic restarts after a worker is lost."""
    resume_mode: str = config_field("auto", choices=("auto", "disable", "resume_path"))
    """`auto`: resume from the newest checkpoint in the run folder; `resume_path`: from
    `resume_from_path`; `disable`: do not resume.
    """
    resume_from_path: str | None = config_field(
        None, allows="a folder", read_when=when("resume_mode", "resume_path")
    )
    """The `global_step_N` folder to resume from."""
    logger: list[str] = config_field(
        factory=lambda: ["console"], registry="tracker", hint="(metrics.jsonl is always written.)"
    )
    """Loggers that receive the metrics, in addition to metrics.jsonl."""

    def num_steps(self, in_epochs: Callable[[int], int]) -> int:
        """Return the steps of the whole run; `in_epochs` maps a number of epochs to steps."""
        if self.total_training_steps is None:
            return in_epochs(self.total_epochs or 1)
        if self.total_epochs is None:
            return self.total_training_steps
        return min(self.total_training_steps, in_epochs(self.total_epochs))


@dataclass(kw_only=True)
class RayConfig(Section):
    """The connection of `trainer.backend=ray` to its cluster."""

    address: str | None = config_field(None, allows="host:port")
    """Cluster to join; null: that of RAY_ADDRESS, otherwise a new one on this machine."""
    namespace: str | None = config_field(None, allows="a name", read_when=JOINS_A_CLUSTER)
    """Ray namespace; null creates a new one."""
    object_store_gib: float | None = config_field(
        None, above=0, read_when=when("address", None), may_change_on_resume=True
    )
    """GiB of the object store of a cluster that the run starts; null: as Ray chooses (30 % of the
    memory). `ray start --object-store-memory=BYTES` sets it for other clusters."""
    runtime_env: dict[str, Any] = config_field(
        factory=dict, allows="what `ray.init` takes", verl="ray_kwargs.ray_init.runtime_env"
    )
    """Runtime environment that is passed to `ray.init`."""


@dataclass(kw_only=True)
class PoolResources(Section):
    """The resources of each process of a pool, if they differ from those of other pools."""

    device: str = config_field("auto", choices=("auto", "cpu", "cuda"))
    """cpu keeps the pool off the GPUs; auto is `trainer.device`."""
    cpus: float | None = config_field(None, above=0, read_when=ON_RAY)
    """CPUs per process; null: `cpus_per_process`."""
    gpus: float | None = config_field(
        None, above=0, at_most=1, hint="as a process computes on one GPU", read_when=ON_RAY
    )
    """GPUs per process, such as 0.5; null: a whole GPU."""
    resources: dict[str, float] = config_field(
        factory=dict, allows="resource: amount", read_when=ON_RAY
    )
    """Ray's custom resources per process."""
    labels: dict[str, str] = config_field(
        factory=dict, allows="label: value", read_when=ON_RAY, may_change_on_resume=True
    )
    """Ray's labels that the pool's nodes must have, such as `{ray.io/accelerator-type: H100}`."""


@dataclass(kw_only=True)
class RunConfig(Section):
    """The sections and keys of every recipe; `verl-like ppo --cfg all` explains them.

    Example:

        @dataclass(kw_only=True)
        class MyConfig(RunConfig):              # the schema of your own recipe
            threshold: float = config_field(0.5, at_least=0, at_most=1)
            # below the field, a docstring explains the key
    """

    never_read: ClassVar[Mapping[str, Sequence[str]]] = {}
    """Reason -> keys of shared sections that this recipe does not read."""
    pool_keys: ClassVar[str] = ""
    """The keys that size a recipe's own pools, if `placement=split` does not apply to it."""

    trainer: TrainerConfig = config_field(factory=TrainerConfig)
    """Length, devices, checkpoints and logging of the run."""
    ray: RayConfig = config_field(factory=RayConfig, read_when=ON_RAY, may_change_on_resume=True)
    """The Ray cluster to start or join, and its runtime environment."""
    timeouts: dict[str, float] = config_field(
        factory=Deadlines.settings,
        allows="seconds above 0, each",
        may_change_on_resume=True,
    )
    """Timeouts in seconds: `connect_s` for joining Ray, `placement_s` for placing a pool,
    `start_s` for starting processes, `rendezvous_s` for opening a process group, `call_s` for a
    call, `collective_s` for a collective of GPUs. A repeated call times out after ten times its
    usual duration, but not before `min_call_s`. Waits longer than `warn_s` are logged.
    """
    resource_pool_spec: dict[str, list[int]] = config_field(
        factory=dict,
        allows="{pool: [processes on each node]}, or [] for an even share",
        may_change_on_resume=True,
    )
    """Pools, with their processes per node."""
    role_mapping: dict[str, str] = config_field(
        factory=dict, allows="role: pool", may_change_on_resume=True
    )
    """Pool of each role; `actor_rollout` is actor and rollout in one process."""
    role_workers: dict[str, str] = config_field(factory=dict, allows="role: dotted path")
    """Worker class of each role."""
    cpus_per_process: float | None = config_field(
        None, above=0, read_when=ON_RAY, may_change_on_resume=True
    )
    """CPUs per worker process; null: min(1, CPUs / processes)."""
    pool_resources: dict[str, PoolResources] = config_field(
        factory=dict,
        allows="{pool: {device, cpus, gpus, resources, labels}}",
        read_when=SEVERAL_POOLS,
        may_change_on_resume=True,
    )
    """Device, CPUs and GPUs of each process of a pool, if they differ from the defaults."""

    @property
    def optional_pools(self) -> Sequence[str]:
        """The pools without which the run may begin and go on, the most important first."""
        return ()

    @property
    def child_pools(self) -> frozenset[str]:
        """Pools that `backend=local` runs as child processes even if they have one process.

        Other pools of one process run in the driver's own thread. A recipe whose roles work while
        the driver does something else overrides this.
        """
        return frozenset()

    def is_inline(self, pool: str, world_size: int) -> bool:
        """Return whether a pool runs in the driver's own thread, which waits for every call."""
        of_one = world_size == 1 and pool not in self.child_pools
        return self.trainer.backend == "local" and of_one

    def for_role(self, role: str) -> Self:
        """Return the configuration for this role's workers, which a recipe may vary by role."""
        return self

    def kind_of(self, role: str) -> str:
        """Return the role that this role is a copy of, or the role itself."""
        return role


C = TypeVar("C", bound=RunConfig)
Placements = Mapping[str, Mapping[str, Sequence[str]]]
"""Preset -> pool -> its roles."""


@dataclass(frozen=True, eq=False)
class Recipe(Generic[C]):
    """A recipe for the configuration: its schema, YAML, roles, presets and checks.

    Example:

        MINE = Recipe("mine", MyConfig, Path(__file__).parent, "my_trainer", placements)
        config = load_config(["data.train_files=a.parquet"], MINE)      # a MyConfig

    Args:
        name: the recipe in messages and on the command line; its schema is `<name>_schema` in YAML.
        schema: the dataclass of its configuration.
        config_dir: folder of its YAML; files in its `placement/` are further presets.
        config_name: name of its YAML, without the ending.
        placements: the pools and roles of each `placement=<preset>`.
        inactive_roles: roles of the recipe that a configuration does not need -> why.
        extra_roles: further roles of a configuration -> (dotted path of the class, another role). A
            further role shares the other role's pool unless `role_mapping` has it.
        complete: returns the configuration with derived values, and notices to show. It gets the
            keys that the user set, and runs before `checks`.
        registries: the modules that register names for keys; they may import torch.
        checks: rules between fields: each raises `ConfigError`, or returns warnings to show.
        translate: translates another system's keys into ours, before settings are checked.
        settings_of_configuration: reads the settings in another system's YAML, from its
            `--config-name` and `--config-path`.
        shares_presets_of: folder of another recipe whose groups of presets it shares.
        own_folder: folder of the user's YAML, which adds presets and extends or replaces files.
    """

    name: str
    schema: type[C]
    config_dir: Path
    config_name: str
    placements: Placements
    inactive_roles: Callable[[Any], Mapping[str, str]] = lambda config: {}
    extra_roles: Callable[[Any], Mapping[str, tuple[str, str]]] = lambda config: {}
    complete: Callable[[C, Collection[str]], tuple[C, Sequence[str]]] = lambda config, keys: (
        config,
        (),
    )
    registries: Sequence[str] = ()
    checks: Sequence[Callable[[C], Sequence[str] | None]] = ()
    translate: Callable[[Sequence[Override]], Sequence[Override]] = lambda settings: settings
    settings_of_configuration: Callable[[str, str], Sequence[str]] | None = None
    shares_presets_of: Path | None = None
    own_folder: Path | None = None

    def __post_init__(self) -> None:
        text = f"The recipe `{self.name}`, whose configuration is a `{self.schema.__name__}`."
        object.__setattr__(self, "__doc__", text)  # for `help()`

    def __repr__(self) -> str:
        """Return the name, because signatures show a recipe as a default."""
        return f"Recipe({self.name!r})"

    def load_registries(self) -> None:
        """Import the modules of `registries`."""
        for module in self.registries:
            importlib.import_module(module)

    @property
    def groups(self) -> list[str]:
        """Groups of presets: `placement`, and the folders of YAML files, own and shared ones."""
        files = (path for folder in self._own_and_shared for path in folder.glob("*/*.yaml"))
        return sorted({"placement", *(path.parent.name for path in files)})

    def preset_names(self, group: str) -> list[str]:
        """Return the presets of a group; an unknown group has none.

        They are the files of its folders and, for `placement`, the names in `placements`.
        """
        files = [path.stem for folder in self.folders for path in folder.glob(f"{group}/*.yaml")]
        return sorted({*files, *(self.placements if group == "placement" else ())})

    @property
    def folders(self) -> list[Path]:
        """The folders to search for YAML; the folder with the run's main file comes first."""
        if self.own_folder is None:
            return self._own_and_shared
        is_main = (self.own_folder / self.config_name).with_suffix(".yaml").is_file()
        user_folders, our_folders = [self.own_folder], self._own_and_shared
        return [*user_folders, *our_folders] if is_main else [*our_folders, *user_folders]

    @property
    def _own_and_shared(self) -> list[Path]:
        return [self.config_dir, *([self.shares_presets_of] if self.shares_presets_of else [])]

    def with_files_of(self, folder: Path, main: str | None) -> Recipe[C]:
        """Return the recipe with a folder of the user's YAML and, optionally, a main file in it."""
        if not folder.is_dir():
            raise ConfigError(f"--config-dir: there is no folder '{folder}'.")
        return replace(self, own_folder=folder, config_name=main or self.config_name)


def placement_presets(split: Mapping[str, Sequence[str]]) -> Placements:
    """Return the presets of a recipe whose `placement=split` puts roles on these pools.

    `colocate` puts all of them on one pool, `standalone` puts each on its own.

    Example:

        placement_presets({"policy_pool": ["actor", "rollout"], "critic_pool": ["critic"]})
    """
    roles = [role for pool_roles in split.values() for role in pool_roles]
    return {
        "colocate": {"global_pool": roles},
        "split": split,
        "standalone": {f"{role}_pool": [role] for role in roles},
    }
