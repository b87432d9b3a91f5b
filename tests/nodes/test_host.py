"""The package refuses a ComfyUI that is too old, in one line that names the version needed."""

import os
import subprocess
import sys
import types

import pytest
from longlive.nodes import host


def _pretend(monkeypatch, version):
    module = types.ModuleType("comfyui_version")
    module.__version__ = version
    monkeypatch.setitem(sys.modules, "comfyui_version", module)


@pytest.mark.parametrize("version", ["0.3.64", "0.8.0", "0.29.9", "v0.29.0"])
def test_require_comfyui_refuses_older(monkeypatch, version):
    _pretend(monkeypatch, version)
    with pytest.raises(ImportError) as error:
        host.require_comfyui()
    message = str(error.value)
    assert "0.30.0 or newer" in message and version in message and "\n" not in message


@pytest.mark.parametrize("version", ["0.30.0", "0.30.1rc1", "0.38.1", "1.0", "v0.31"])
def test_require_comfyui_accepts_newer(monkeypatch, version):
    _pretend(monkeypatch, version)
    host.require_comfyui()


def test_require_comfyui_refuses_host_without_a_version(monkeypatch):
    monkeypatch.setitem(sys.modules, "comfyui_version", None)
    monkeypatch.setitem(sys.modules, "folder_paths", types.ModuleType("folder_paths"))
    with pytest.raises(ImportError, match="0.30.0 or newer"):
        host.require_comfyui()


def test_require_comfyui_is_silent_outside_comfyui(monkeypatch):
    monkeypatch.setitem(sys.modules, "comfyui_version", None)
    monkeypatch.delitem(sys.modules, "folder_paths", raising=False)
    host.require_comfyui()


def test_import_into_an_older_comfyui_ends_in_one_line(tmp_path, checkout):
    """The whole way: imported as ComfyUI imports a custom node, under a name made from its path, without torch or ComfyUI behind it."""
    (tmp_path / "comfyui_version.py").write_text('__version__ = "0.3.64"\n')
    code = (
        "import importlib.util, sys; root = sys.argv[1]; name = root.replace('.', '_x_')\n"
        "spec = importlib.util.spec_from_file_location(name, root + '/__init__.py')\n"
        "module = importlib.util.module_from_spec(spec); sys.modules[name] = module; spec.loader.exec_module(module)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    result = subprocess.run([sys.executable, "-c", code, str(checkout)], capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert result.returncode == 1
    assert result.stderr.strip().splitlines()[-1] == (
        "ImportError: LongLive Stream needs ComfyUI 0.30.0 or newer, and this ComfyUI is 0.3.64: please update ComfyUI"
    )
