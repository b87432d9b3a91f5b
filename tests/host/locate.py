"""Which ComfyUI the tests and the demo run against: the one named, else the `comfy` workspace, else one installed into this checkout (install.py)."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

MINIMUM_COMFYUI = (0, 30, 0)


class HostError(RuntimeError):
    """Something about the host is missing or unusable; the message says what and what would help."""


@dataclass(frozen=True)
class Host:
    """A ComfyUI that can be started. ``source`` says in a few words how it was found."""

    comfyui: Path
    python: Path
    source: str


def find_existing(environment: Mapping[str, str] = os.environ) -> Host | None:
    """The ComfyUI that is already there, or None.

    COMFYUI_PATH wins, and anything wrong with it is an error; a `comfy` workspace that does not fit is passed over.
    """
    named = environment.get("COMFYUI_PATH")
    if named:
        comfyui = Path(named).expanduser().resolve()
        check_comfyui(comfyui)
        return Host(comfyui, _python_of(comfyui, environment), "COMFYUI_PATH")
    workspace = _comfy_workspace()
    if workspace is None:
        return None
    try:
        check_comfyui(workspace)
        return Host(workspace, _python_of(workspace, environment), "the comfy workspace")
    except HostError:
        return None


def check_comfyui(comfyui: Path) -> None:
    """Raise HostError unless the folder holds a ComfyUI that is new enough."""
    if not (comfyui / "main.py").is_file() or not (comfyui / "comfy").is_dir():
        raise HostError(f"{comfyui} is not a ComfyUI folder: main.py and comfy/ were looked for; set COMFYUI_PATH to the folder that holds them")
    version_file = comfyui / "comfyui_version.py"
    found = re.search(r'"([\d.]+)', version_file.read_text(encoding="utf-8")) if version_file.is_file() else None
    version = found.group(1) if found else "0"
    if tuple(int(part) for part in version.split(".") if part)[:3] < MINIMUM_COMFYUI:
        needed = ".".join(str(part) for part in MINIMUM_COMFYUI)
        raise HostError(f"the ComfyUI in {comfyui} is {version}, and {needed} or newer is needed; update it, or unset COMFYUI_PATH to have one installed here")


def environment_python(folder: Path) -> Path:
    """Where a virtual environment keeps its Python."""
    return folder / "Scripts" / "python.exe" if os.name == "nt" else folder / "bin" / "python"


def _python_of(comfyui: Path, environment: Mapping[str, str]) -> Path:
    named = environment.get("COMFYUI_PYTHON")
    if named:
        # Not resolved: a virtual environment's Python is a link, and following it leaves the environment.
        python = Path(os.path.abspath(os.path.expanduser(named)))
        if not python.is_file():
            raise HostError(f"COMFYUI_PYTHON is {named}, which is not a file; set it to the python that starts this ComfyUI")
        return python
    candidates = [
        environment_python(comfyui / ".venv"),
        environment_python(comfyui / "venv"),
        comfyui.parent / "python_embeded" / "python.exe",
        comfyui / "python_embeded" / "python.exe",
    ]
    for python in candidates:
        if python.is_file():
            return python
    looked = ", ".join(str(python) for python in candidates)
    raise HostError(f"no Python was found for the ComfyUI in {comfyui} (looked at {looked}); set COMFYUI_PYTHON to the python that starts it")


def _comfy_workspace() -> Path | None:
    """The workspace of comfy-cli, when that is installed and has one."""
    command = shutil.which("comfy")
    if command is None:
        return None
    try:
        answer = subprocess.run(
            [command, "--skip-prompt", "which"],
            capture_output=True,
            text=True,
            timeout=60,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "DO_NOT_TRACK": "1"},
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    return parse_workspace(answer)


def parse_workspace(answer: str) -> Path | None:
    """Read the folder from what `comfy which` prints: one JSON object (newer versions, into a pipe) or a line ending in a path."""
    for line in answer.splitlines():
        try:
            path = json.loads(line)["data"]["workspace_path"]
        except (ValueError, KeyError, TypeError):
            named = re.search(r"path:\s*(.+)$", line)
            path = named.group(1).strip() if named else None
        if path and Path(path).is_dir():
            return Path(path).resolve()
    return None
