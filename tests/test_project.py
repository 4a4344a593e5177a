"""The project's own files agree with each other."""

import re
import tomllib
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from rattler import MatchSpec
from ruamel.yaml import YAML

ROOT = Path(__file__).parent.parent
CONDA_NAMES = {"duckdb": "python-duckdb", "matplotlib": "matplotlib-base"}


def _pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def _environment() -> tuple[list[str], list[str]]:
    entries = YAML(typ="safe").load((ROOT / "environment.yml").read_text())["dependencies"]
    conda = [e for e in entries if isinstance(e, str)]
    pip = next(e["pip"] for e in entries if isinstance(e, dict))
    return conda, pip


def test_environment_yml_asks_for_what_pyproject_asks_for() -> None:
    conda, pip = _environment()
    expected = {
        CONDA_NAMES.get(r.name, r.name): str(r.specifier) for r in map(Requirement, _pyproject()["dependencies"])
    }
    given = {MatchSpec(e).name.normalized: str(MatchSpec(e).version or "") for e in conda}
    given |= {Requirement(e).name: str(Requirement(e).specifier) for e in pip if not e.startswith("-e")}
    assert given.pop("python") == _pyproject()["requires-python"]
    assert given.pop("pip") == ""
    assert given == expected


def test_lock_file_pins_every_dependency_at_an_allowed_version() -> None:
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    pins = {canonicalize_name(name): version.split()[0] for name, version in pins.items()}
    project = _pyproject()
    for requirement in map(Requirement, project["dependencies"] + project["optional-dependencies"]["dev"]):
        version = pins[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{requirement} does not allow the locked {version}"


def test_readme_names_only_make_targets_and_commands_that_exist() -> None:
    readme = (ROOT / "README.md").read_text()
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.M))
    assert set(re.findall(r"(?:^    |`)make ([a-z]+)", readme, flags=re.M)) <= targets
