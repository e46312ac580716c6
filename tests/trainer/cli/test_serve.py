"""`verl-like serve` takes its key from the environment, and says what to install."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from trainer.cli import serve
from trainer.serve import app


def test_the_key_may_be_in_an_environment_variable(
    tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    keys: list[str] = []
    monkeypatch.setattr(app, "serve", lambda *arguments: keys.append(arguments[3]))
    words = [f"{tiny_dir}/model", f"trainer.default_local_dir={tmp_path}", "trainer.device=cpu"]
    words += ["data.max_prompt_length=32", "data.max_response_length=16"]
    monkeypatch.setenv("MY_KEY", "tml-secret")
    serve.main([*words, "--host", "0.0.0.0", "--token-env", "MY_KEY"])
    assert keys == ["tml-secret"]
    for name, value, text in (
        ("OTHER_KEY", "secret", "must begin with 'tml-'"),
        ("NO_KEY", "", "--token-env=NO_KEY: this environment variable is not set, or empty"),
    ):
        monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit, match=text):
            serve.main([*words, "--token-env", name])
    with pytest.raises(SystemExit):
        serve.main([*words, "--token-env", "MY_KEY", "--token", "tml-other"])
    assert "not allowed with argument" in capsys.readouterr().err


@pytest.mark.parametrize("package", ["uvicorn", "starlette", "pydantic", "google.protobuf"])
def test_without_its_extra_the_error_names_the_extra(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [*sys.modules]:
        if name.startswith(("trainer.serve.", package)):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "trainer.cli.serve")
    import trainer.cli.serve

    with pytest.raises(SystemExit, match=rf"needs the package {package}.*\[serve\]"):
        trainer.cli.serve.main(["some/model"])
