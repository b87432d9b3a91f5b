"""Finding, installing and linking, on folders made for the purpose."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from longlive.tests.browser import frontend
from longlive.tests.host import install, locate, server, stand_in
from longlive.tests.host.install import Installer
from longlive.tests.host.locate import HostError


def _make_comfyui(folder, version="0.30.0"):
    (folder / "comfy").mkdir(parents=True)
    (folder / "main.py").touch()
    (folder / "comfyui_version.py").write_text(f'__version__ = "{version}"\n')
    return folder


def _make_file(path):
    path.parent.mkdir(parents=True)
    path.touch()
    return path


def test_find_existing_takes_the_named_python(tmp_path):
    comfyui, python = _make_comfyui(tmp_path / "ComfyUI"), _make_file(tmp_path / "elsewhere" / "python")
    found = locate.find_existing({"COMFYUI_PATH": str(comfyui), "COMFYUI_PYTHON": str(python)})
    assert (found.comfyui, found.python) == (comfyui, python)


@pytest.mark.parametrize("folder", [".venv", "venv"])
def test_find_existing_takes_the_virtual_environment(tmp_path, folder):
    comfyui = _make_comfyui(tmp_path / "ComfyUI")
    python = _make_file(locate.environment_python(comfyui / folder))
    assert locate.find_existing({"COMFYUI_PATH": str(comfyui)}).python == python


def test_find_existing_takes_the_portable_python(tmp_path):
    comfyui = _make_comfyui(tmp_path / "ComfyUI")
    python = _make_file(tmp_path / "python_embeded" / "python.exe")
    assert locate.find_existing({"COMFYUI_PATH": str(comfyui)}).python == python


def test_find_existing_says_where_it_looked_for_python(tmp_path):
    comfyui = _make_comfyui(tmp_path / "ComfyUI")
    with pytest.raises(HostError, match="python_embeded.*COMFYUI_PYTHON"):
        locate.find_existing({"COMFYUI_PATH": str(comfyui)})


def test_find_existing_refuses_a_python_that_is_not_there(tmp_path):
    comfyui = _make_comfyui(tmp_path / "ComfyUI")
    with pytest.raises(HostError, match="COMFYUI_PYTHON is .*nowhere"):
        locate.find_existing({"COMFYUI_PATH": str(comfyui), "COMFYUI_PYTHON": str(tmp_path / "nowhere")})


def test_find_existing_refuses_an_older_comfyui(tmp_path):
    comfyui = _make_comfyui(tmp_path / "ComfyUI", "0.3.64")
    with pytest.raises(HostError, match="is 0.3.64, and 0.30.0 or newer is needed"):
        locate.find_existing({"COMFYUI_PATH": str(comfyui)})


def test_find_existing_refuses_another_folder(tmp_path):
    with pytest.raises(HostError, match="not a ComfyUI folder"):
        locate.find_existing({"COMFYUI_PATH": str(tmp_path)})


def test_parse_workspace_reads_both_forms(tmp_path):
    quoted = str(tmp_path).replace("\\", "\\\\")
    assert locate.parse_workspace('{"ok": true, "data": {"workspace_path": "' + quoted + '"}}') == tmp_path.resolve()
    assert locate.parse_workspace(f"some notice\nTarget ComfyUI path: {tmp_path}\n") == tmp_path.resolve()
    assert locate.parse_workspace('{"ok": true, "data": {"workspace_path": "/nowhere/at/all"}}') is None


def test_installer_step_runs_once_and_again_after_a_change_or_a_failure(tmp_path):
    ran = []
    installer = Installer(tmp_path, lambda text: None)
    installer._step("thing", ("1",), "", lambda: ran.append(1))
    installer._step("thing", ("1",), "", lambda: ran.append(2))
    assert ran == [1]
    with pytest.raises(OSError, match="no space"):
        installer._step("thing", ("2",), "", _fail)
    installer._step("thing", ("2",), "", lambda: ran.append(3))
    assert ran == [1, 3]


def _fail():
    raise OSError("no space")


def test_pip_of_this_python_serves_one_that_has_none(tmp_path, monkeypatch):
    bare = tmp_path / "python"
    monkeypatch.setattr(install, "_has_module", lambda python, name: Path(python) != bare)
    assert install._pip_for(bare) == [sys.executable, "-m", "pip", "--python", str(bare)]
    assert install._pip_for(Path("other")) == ["other", "-m", "pip"]
    monkeypatch.setattr(install, "_has_module", lambda python, name: False)
    with pytest.raises(HostError, match="neither .* nor .* has pip; run this with a Python that has it, or `.*python -m ensurepip`"):
        install._pip_for(bare)


@pytest.mark.parametrize("links", [True, False])
def test_link_or_copy_replaces_what_was_there(tmp_path, monkeypatch, links):
    source, target = tmp_path / "source", tmp_path / "target"
    for path in (source / "__init__.py", source / "nodes" / "a.py", source / "tests" / "b.py"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("1")
    if not links:
        monkeypatch.setattr(type(target), "symlink_to", lambda *_, **__: (_ for _ in ()).throw(OSError("a required privilege is not held")))
    for _ in range(2):
        server.link_or_copy(source, target)
        assert (target / "nodes" / "a.py").is_file()
        assert target.is_symlink() == links
    assert (target / "tests").exists() == links
    shutil.rmtree(source)
    assert (target / "__init__.py").is_file() != links


def test_server_says_why_it_did_not_start(tmp_path):
    comfyui = _make_comfyui(tmp_path / "ComfyUI")
    (comfyui / "main.py").write_text("raise SystemExit('no module named something')")
    host = locate.Host(comfyui, Path(sys.executable), "a test")
    with pytest.raises(HostError, match="(?s)ended with code 1.*no module named something"):
        server.Server(host, tmp_path / "base", {}).start()


def test_with_stand_ins_changes_loaders_and_size_alone():
    workflow = {
        "1": {"class_type": "LongLiveLoadDiT", "inputs": {"file": "a.pt"}},
        "2": {"class_type": "CLIPLoader", "inputs": {"clip_name": "b"}},
        "3": {"class_type": "VAELoader", "inputs": {"vae_name": "wan2.2_vae.safetensors"}},
        "4": {"class_type": "LongLiveEmptyLatent", "inputs": {"width": 1280, "height": 704, "seconds": 4.0, "model": ["1", 0]}},
        "5": {"class_type": "ImageCompositeMasked", "inputs": {"x": 640, "y": 352, "resize_source": True}},
    }
    small = stand_in.with_stand_ins(workflow)
    stand_ins = ["LongLiveStandInDiT", "LongLiveStandInCLIP", "LongLiveStandInVAE"]
    assert [node["class_type"] for node in small.values()] == [*stand_ins, "LongLiveEmptyLatent", "ImageCompositeMasked"]
    assert small["4"]["inputs"] == {"width": stand_in.WIDTH, "height": stand_in.HEIGHT, "seconds": 4.0, "model": ["1", 0]}
    assert small["5"]["inputs"] == {"x": stand_in.WIDTH // 2, "y": stand_in.HEIGHT // 2, "resize_source": True}
    assert small["3"]["inputs"]["model"] == "LongLive 2.0"
    assert workflow["4"]["inputs"]["width"] == 1280


@pytest.mark.parametrize(("file", "release"), [("wan2.2_vae.safetensors", "LongLive 2.0"), ("wan_2.1_vae.safetensors", "LongLive 1.0")])
def test_release_of_reads_the_vae_file(file, release):
    assert stand_in.release_of({"1": {"class_type": "VAELoader", "inputs": {"vae_name": file}}}) == release


def test_find_browser_takes_the_named_program_else_what_is_installed(tmp_path):
    program = tmp_path / "my-browser"
    program.touch()
    assert frontend.find_browser({"LONGLIVE_BROWSER": str(program)}) == str(program)
    assert frontend.find_browser({}, which=lambda name: "/there/chromium" if name == "chromium" else None) == "/there/chromium"


def test_find_browser_says_how_to_get_one(tmp_path, monkeypatch):
    monkeypatch.setattr(frontend, "PLACES", ())
    with pytest.raises(frontend.BrowserError, match="apt-get install.*LONGLIVE_BROWSER"):
        frontend.find_browser({}, which=lambda name: None)
    with pytest.raises(frontend.BrowserError, match="nowhere, which is not a file"):
        frontend.find_browser({"LONGLIVE_BROWSER": str(tmp_path / "nowhere")})
