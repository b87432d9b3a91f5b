"""What the registry and a user's installer read: metadata, requirements, the size of the checkout."""

from __future__ import annotations

import subprocess

import pytest

try:
    import tomllib
except ImportError:  # Python 3.10, where pytest brings tomli
    import tomli as tomllib


@pytest.fixture(scope="module")
def project(checkout):
    return tomllib.loads((checkout / "pyproject.toml").read_text(encoding="utf-8"))


def test_dependencies_equal_requirements(project, checkout):
    lines = (line.strip() for line in (checkout / "requirements.txt").read_text(encoding="utf-8").splitlines())
    required = [line for line in lines if line and not line.startswith("#")]
    assert [line.replace('"', "'") for line in project["project"]["dependencies"]] == [line.replace('"', "'") for line in required]


def test_metadata_follows_the_registry_rules(project):
    name = project["project"]["name"]
    assert name == "longlive-stream" and "comfyui" not in name and not name[0].isdigit()
    assert project["project"]["license"] == "Apache-2.0"
    assert len(project["project"]["version"].split(".")) == 3
    assert project["tool"]["comfy"]["requires-comfyui"] == ">=0.30.0"


def test_minimum_version_is_said_alike_everywhere(project):
    from longlive.nodes.host import MINIMUM_COMFYUI
    from longlive.tests.host import locate

    assert project["tool"]["comfy"]["requires-comfyui"] == ">=" + ".".join(map(str, MINIMUM_COMFYUI))
    assert locate.MINIMUM_COMFYUI == MINIMUM_COMFYUI


def test_tools_are_pinned_alike(project):
    from longlive.tests.host.install import COMMAND_TOOLS

    assert "ruff" + project["tool"]["ruff"]["required-version"] in COMMAND_TOOLS


def test_tracked_files_stay_below_32_mib(checkout):
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=checkout, capture_output=True, check=True).stdout.decode().split("\0")
    files = [checkout / name for name in listed if name]
    assert sum(file.stat().st_size for file in files if file.is_file()) <= 32 * 2**20
