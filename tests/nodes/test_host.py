"""The package refuses a ComfyUI that is too old, in one line that names the version needed."""

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
