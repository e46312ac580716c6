"""Call every method of the `tinker` SDK that is not deprecated; print the results as JSON.

Runs in an environment with the SDK: `sdk_probe.py URL MODEL`. A value is "works" if the method
returned the expected result, otherwise the error's text.
"""

from __future__ import annotations

import inspect
import json
import math
import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any

warnings.simplefilter("ignore")
import tinker  # noqa: E402
from tinker import types  # noqa: E402

CLIENTS = ("service", "training", "sampling", "rest", "admin")


def live_methods() -> list[str]:
    """Return the public methods that are not deprecated."""
    methods = []
    for name in CLIENTS:
        module = import_module(f"tinker.lib.public_interfaces.{name}_client")
        cls = getattr(module, f"{name.capitalize()}Client")
        for method in dir(cls):
            static = inspect.getattr_static(cls, method)
            is_old = getattr(static, "__deprecated__", None) or method.endswith("_async")
            if not method.startswith("_") and callable(getattr(cls, method)) and not is_old:
                methods.append(f"{cls.__name__}.{method}")
    return methods


class Probe:
    """A session, and calls with their expected results."""

    def __init__(self, url: str, model: str) -> None:
        self.url, self.model = url, model
        self.results: dict[str, str] = {}
        self.service = tinker.ServiceClient(base_url=url, api_key="tml-x")
        self.rest = tinker.RestClient(base_url=url, api_key="tml-x")
        self.admin = tinker.AdminClient(base_url=url, api_key="tml-x")

    def check(self, name: str, call: Callable[[], Any], is_right: Callable[[Any], Any]) -> Any:
        """Record whether a call returns the expected value, and return the value."""
        try:
            value = call()
            value = value.result(60) if hasattr(value, "result") else value
            self.results[name] = "works" if is_right(value) else f"wrong: {value!r:.300}"
            return value
        except Exception as error:  # noqa: BLE001 - its text is the result
            self.results[name] = f"{type(error).__name__}: {error}"[:300]
            return None

    def run(self) -> None:
        """Make all calls."""
        self.train()
        self.sample()
        self.read_records()
        self.change_records()
        self.check(
            "ServiceClient.close", lambda: self.service.close("success"), lambda v: v is None
        )

    def train(self) -> None:
        service, check, base = self.service, self.check, self.model
        training = check(
            "ServiceClient.create_lora_training_client",
            lambda: service.create_lora_training_client(
                base, rank=4, seed=1, user_metadata={"renderer_name": "plain"}
            ),
            lambda v: v.model_id.endswith(":train:0"),
        )
        self.training = training
        check("ServiceClient.get_telemetry", service.get_telemetry, lambda v: True)
        check("ServiceClient.get_console_url", service.get_console_url, lambda v: "http" in v)
        check("TrainingClient.get_telemetry", training.get_telemetry, lambda v: True)
        check("TrainingClient.get_console_url", training.get_console_url, lambda v: "http" in v)
        info = check("TrainingClient.get_info", training.get_info, lambda v: v.lora_rank == 4)
        assert info.model_data.model_name == base
        tokenizer = check("TrainingClient.get_tokenizer", training.get_tokenizer, callable)
        self.ids = tokenizer.encode("say a aaaa")
        ids = self.ids
        inputs = {"target_tokens": ids[1:], "weights": [1.0] * (len(ids) - 1)}
        datum = types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)
        forward = check(
            "TrainingClient.forward",
            lambda: training.forward([datum], "cross_entropy"),
            lambda v: v.metrics["loss:sum"] > 0,
        )
        loss = forward.metrics["loss:sum"]
        check(
            "TrainingClient.forward_backward",
            lambda: training.forward_backward([datum, datum], "cross_entropy"),
            lambda v: math.isclose(v.metrics["loss:sum"], 2 * loss, rel_tol=1e-4),
        )
        check(
            "TrainingClient.optim_step",
            lambda: training.optim_step(types.AdamParams(learning_rate=1e-2)),
            lambda v: v.metrics["grad_norm"] > 0,
        )

        def custom(data: Any, log_probs: Any) -> Any:
            total = sum(-row.sum() for row in log_probs)
            return total, {"mine": float(total)}

        check(
            "TrainingClient.forward_backward_custom",
            lambda: training.forward_backward_custom([datum], custom),
            lambda v: 0 < v.metrics["mine"] < loss,
        )

        def neg_ll(logprobs: Any, weights: Any) -> Any:
            total = -(logprobs * weights).sum()
            return total, {"custom/neg_ll:sum": total}

        check(
            "ServiceClient.create_custom_loss",
            lambda: service.create_custom_loss(neg_ll, {"logprobs": 1, "weights": 1}),
            lambda v: "neg_ll" in v.name,
        )
        saved = check(
            "TrainingClient.save_state",
            lambda: training.save_state("state", ttl_seconds=7200),
            lambda v: v.path == f"tinker://{training.model_id}/weights/state",
        )
        self.state = saved.path
        for name in ("state", "state_with_optimizer"):
            method = f"create_training_client_from_{name}"
            check(
                f"ServiceClient.{method}",
                lambda method=method: getattr(service, method)(self.state),
                lambda v: v.get_info().lora_rank == 4,
            )
        check(
            "TrainingClient.save_weights_external",
            lambda: training.save_weights_external("out"),
            lambda v: v,
        )

    def sample(self) -> None:
        training, check, ids = self.training, self.check, self.ids
        prompt = types.ModelInput.from_ints(ids[:5])
        params = types.SamplingParams(max_tokens=6, seed=3)
        saved = check(
            "TrainingClient.save_weights_for_sampler",
            lambda: training.save_weights_for_sampler("sampler"),
            lambda v: v.path == f"tinker://{training.model_id}/sampler_weights/sampler",
        )
        self.sampler_path = saved.path
        sampling = check(
            "TrainingClient.save_weights_and_get_sampling_client",
            training.save_weights_and_get_sampling_client,
            callable_sampler,
        )
        drawn = check(
            "SamplingClient.sample",
            lambda: sampling.sample(prompt, 2, params),
            lambda v: len(v.sequences) == 2 and len(v.sequences[0].tokens) <= 6,
        )

        def draws_the_same(client: Any) -> bool:
            again = client.sample(prompt, 2, params).result(60)
            return bool([s.tokens for s in again.sequences] == [s.tokens for s in drawn.sequences])

        for name, call in (
            (
                "TrainingClient.create_sampling_client",
                lambda: training.create_sampling_client(saved.path),
            ),
            (
                "ServiceClient.create_sampling_client",
                lambda: self.service.create_sampling_client(model_path=saved.path),
            ),
            (
                "SamplingClient.create",
                lambda: type(sampling).create(sampling.holder, model_path=saved.path),
            ),
        ):
            check(name, call, draws_the_same)
        check(
            "SamplingClient.compute_logprobs",
            lambda: sampling.compute_logprobs(types.ModelInput.from_ints(ids)),
            lambda v: v[0] is None and len(v) == len(ids) and all(x < 0 for x in v[1:]),
        )
        check("SamplingClient.get_base_model", sampling.get_base_model, lambda v: v == self.model)
        check("SamplingClient.get_tokenizer", sampling.get_tokenizer, lambda v: v.encode("say a"))
        check("SamplingClient.get_telemetry", sampling.get_telemetry, lambda v: True)
        handle = check("SamplingClient.get_sampler_handle", sampling.get_sampler_handle, bool)
        check(
            "SamplingClient.from_sampler_handle",
            lambda: type(sampling).from_sampler_handle(handle, api_key="tml-x"),
            draws_the_same,
        )
        from tinker.lib.api_future_impl import QueueState

        check(
            "SamplingClient.on_queue_state_change",
            lambda: sampling.on_queue_state_change(QueueState.ACTIVE, None),
            lambda v: v is None,
        )

    def read_records(self) -> None:
        rest, check, run = self.rest, self.check, self.training.model_id
        session, paths = run.partition(":")[0], {self.state, self.sampler_path}
        check("RestClient.get_telemetry", rest.get_telemetry, lambda v: True)
        check("AdminClient.get_telemetry", self.admin.get_telemetry, lambda v: True)
        check(
            "RestClient.get_server_capabilities",
            rest.get_server_capabilities,
            lambda v: v.supported_models[0].model_name == self.model,
        )
        check(
            "RestClient.list_training_runs",
            rest.list_training_runs,
            lambda v: run in [each.training_run_id for each in v.training_runs],
        )
        for name, key in (
            ("get_training_run", run),
            ("get_training_run_by_tinker_path", self.state),
        ):
            check(
                f"RestClient.{name}",
                lambda name=name, key=key: getattr(rest, name)(key),
                lambda v: v.user_metadata == {"renderer_name": "plain"} and v.lora_rank == 4,
            )
        check(
            "RestClient.get_weights_info_by_tinker_path",
            lambda: rest.get_weights_info_by_tinker_path(self.state),
            lambda v: (v.base_model, v.lora_rank) == (self.model, 4),
        )
        check(
            "RestClient.list_checkpoints",
            lambda: rest.list_checkpoints(run),
            lambda v: {each.tinker_path for each in v.checkpoints} == paths,
        )
        check(
            "RestClient.list_user_checkpoints",
            rest.list_user_checkpoints,
            lambda v: paths <= {each.tinker_path for each in v.checkpoints},
        )
        check("RestClient.list_sessions", rest.list_sessions, lambda v: session in v.sessions)
        record = check(
            "RestClient.get_session",
            lambda: rest.get_session(session),
            lambda v: run in v.training_run_ids,
        )
        check(
            "RestClient.get_sampler",
            lambda: rest.get_sampler(record.sampler_ids[0]),
            lambda v: v.base_model == self.model,
        )

    def change_records(self) -> None:
        rest, check, run = self.rest, self.check, self.training.model_id

        def facts() -> Any:
            listed = rest.list_checkpoints(run).result(60).checkpoints
            return next(each for each in listed if each.tinker_path == self.state)

        for name, is_public in (("publish", True), ("unpublish", False)):
            check(
                f"RestClient.{name}_checkpoint_from_tinker_path",
                lambda name=name: getattr(rest, f"{name}_checkpoint_from_tinker_path")(self.state),
                lambda v, is_public=is_public: facts().public == is_public,
            )
        check(
            "RestClient.set_checkpoint_ttl_from_tinker_path",
            lambda: rest.set_checkpoint_ttl_from_tinker_path(self.state, None),
            lambda v: facts().expires_at is None,
        )
        check(
            "RestClient.delete_checkpoint",
            lambda: rest.delete_checkpoint(run, "sampler_weights/sampler"),
            lambda v: len(rest.list_checkpoints(run).result(60).checkpoints) == 1,
        )
        for name, call in {
            "ServiceClient.copy_weights": lambda: self.service.copy_weights(self.state),
            "RestClient.copy_weights": lambda: rest.copy_weights(self.state, "project"),
            "RestClient.assign_session_project": lambda: rest.assign_session_project("a", "b"),
            "RestClient.export_session_trace": lambda: rest.export_session_trace("a"),
            "RestClient.get_external_weights_urls": lambda: rest.get_external_weights_urls(
                self.state.replace("/weights/", "/external_weights/")
            ),
            "RestClient.whoami": rest.whoami,
            "AdminClient.get_audit_log": self.admin.get_audit_log,
            "AdminClient.get_billing_usage": lambda: self.admin.get_billing_usage(
                "2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z"
            ),
            "AdminClient.get_current_checkpoint_storage_usage": (
                self.admin.get_current_checkpoint_storage_usage
            ),
        }.items():
            check(name, call, lambda v: True)
        check(
            "RestClient.delete_checkpoint_from_tinker_path",
            lambda: rest.delete_checkpoint_from_tinker_path(self.state),
            lambda v: not rest.list_checkpoints(run).result(60).checkpoints,
        )


def callable_sampler(client: Any) -> bool:
    """True if a client samples."""
    return callable(client.sample)


if __name__ == "__main__":
    probe = Probe(*sys.argv[1:])
    probe.run()
    print(json.dumps({"methods": live_methods(), "results": probe.results}))
