"""The files under deploy/ say what the program understands."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from dflash.cli import app

DEPLOY = Path(__file__).parents[2] / "deploy"
ENV = (DEPLOY.parent / "dflash" / "env.py").read_text(encoding="utf-8")


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text(encoding="utf-8")))


def flags_of_serve() -> set[str]:
    command: Any = get_command(app)
    return {name for parameter in command.commands["serve"].params for name in parameter.opts}


def test_kubernetes_hands_the_block_size_to_the_container() -> None:
    kinds = {document["kind"]: document for document in documents("kubernetes.yaml")}
    assert "DFLASH_BLOCK_SIZE" in kinds["ConfigMap"]["data"]
    (container,) = kinds["Deployment"]["spec"]["template"]["spec"]["containers"]
    sources = [ref["name"] for entry in container["envFrom"] for ref in entry.values()]
    assert set(sources) == {kinds["ConfigMap"]["metadata"]["name"]}
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container[probe]["httpGet"]["path"] == "/health"
    selector = kinds["Service"]["spec"]["selector"]
    assert selector == kinds["Deployment"]["spec"]["template"]["metadata"]["labels"]


def test_every_variable_in_the_files_is_one_that_is_read() -> None:
    for file in DEPLOY.iterdir():
        for name in re.findall(r"DFLASH_[A-Z_]+", file.read_text(encoding="utf-8")):
            assert f'"{name}"' in ENV, f"{file.name}: nothing reads {name}"


def test_every_flag_in_the_files_is_one_that_serve_has() -> None:
    known = flags_of_serve()
    for name in ("compose.yaml", "kubernetes.yaml"):
        for flag in re.findall(r"(?<=[\"\s])--[a-z][a-z-]*", (DEPLOY / name).read_text("utf-8")):
            assert flag in known, f"{name}: dflash serve has no {flag}"
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    entry = ast.literal_eval(re.findall(r"^ENTRYPOINT (.*)$", text, re.M)[0])
    assert entry[:2] == ["dflash", "serve"]
    assert {word for word in entry if word.startswith("--")} <= known


def test_compose_hands_the_block_size_to_the_container_and_listens_here_only() -> None:
    (document,) = documents("compose.yaml")
    service = document["services"]["dflash"]
    assert "DFLASH_BLOCK_SIZE" in service["environment"]
    assert service["ports"] == ["127.0.0.1:8000:8000"]


def test_the_image_installs_extras_that_exist() -> None:
    project = (DEPLOY.parent / "pyproject.toml").read_text(encoding="utf-8")
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    for extra in re.findall(r"'\.\[([\w,]+)\]'", text)[0].split(","):
        assert re.search(rf"^{extra} = \[", project, re.M), f"there is no extra {extra}"


@pytest.mark.parametrize("name", ["kubernetes.yaml", "compose.yaml", "Dockerfile"])
def test_the_grace_for_stopping_is_longer_than_the_drain(name: str) -> None:
    text = (DEPLOY / name).read_text(encoding="utf-8")
    for seconds in re.findall(r"(?:stop_grace_period|terminationGracePeriodSeconds): (\d+)", text):
        assert int(seconds) > 30
