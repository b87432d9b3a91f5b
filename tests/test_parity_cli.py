"""``python tests/parity.py DIR…`` on folders made here in the reference cases' format: what it prints and how it exits."""

import os
import re
import subprocess
import sys

import pytest
import torch
from longlive.tests.freeze_cases import DATA, make_inputs, make_weights, read
from safetensors.torch import save_file


@pytest.fixture
def run(checkout, comfyui_path):
    """Run one of the command-line tools; returns (exit code, lines printed)."""

    def run(tool, *arguments):
        environment = os.environ | {"COMFYUI_PATH": str(comfyui_path)}
        done = subprocess.run(
            [sys.executable, f"tests/{tool}", *map(str, arguments)], cwd=checkout, env=environment, capture_output=True, text=True, timeout=600
        )
        return done.returncode, done.stdout.splitlines()

    return run


def make_case(path, name, off_by=0.0, without=(), **settings):
    """A frozen case as a reference case; ``off_by`` moves the last chunk's latents by that much relative L2."""
    stored, latents = read(DATA / f"{name}.safetensors")
    tensors = make_inputs(stored) | {"latents": latents.clone()}
    last = tensors["latents"][:, -int(stored["frames_per_chunk"]) :]
    last *= 1 + off_by
    save_file({key: value.contiguous() for key, value in tensors.items() if key not in without}, path, metadata=stored | settings)


@pytest.fixture
def folders(tmp_path):
    """Two folders with a model each, below one."""
    for name, channels in (("second", 48), ("first", 16)):
        (tmp_path / name).mkdir()
        save_file({key: value.contiguous() for key, value in make_weights(channels).items()}, tmp_path / name / "model.safetensors")
    return tmp_path


def lines_of(lines):
    """{case: (error, verdict)} of the lines printed."""
    found = (re.fullmatch(r"(\S+): (\S+) (pass|FAIL.*)", line) for line in lines)
    return {match[1]: (float(match[2]), match[3]) for match in found if match}


def test_all_cases_below_the_limit(folders, run):
    make_case(folders / "second" / "one_cut.safetensors", "one_cut")
    make_case(folders / "second" / "batch.safetensors", "batch2_cuts")
    make_case(folders / "second" / "extension.safetensors", "extension_cut")
    make_case(folders / "second" / "almost.safetensors", "i2v", off_by=8e-6)
    make_case(folders / "first" / "switch.safetensors", "first_switch_off_grid")
    code, lines = run("parity.py", folders / "second", folders)
    cases = lines_of(lines)
    assert set(cases) == {"second/one_cut", "second/batch", "second/extension", "second/almost", "first/switch"}
    assert code == 0 and {verdict for _, verdict in cases.values()} == {"pass"}
    assert cases.pop("second/almost")[0] == pytest.approx(8e-6, rel=0.3) and all(error < 5e-6 for error, _ in cases.values())
    assert len([line for line in lines if line.startswith("second/one_cut")]) == 2, "named twice, run twice"
    assert lines[-1] == "9 passed, 0 failed"


def test_one_bad_case_makes_it_fail(folders, run):
    make_case(folders / "second" / "good.safetensors", "t2v")
    make_case(folders / "second" / "off.safetensors", "t2v", off_by=1.5e-5)
    make_case(folders / "second" / "nan.safetensors", "t2v", off_by=float("nan"))
    make_case(folders / "second" / "shorter.safetensors", "t2v", frames_per_chunk="3", window_frames="9")
    make_case(folders / "second" / "no_noise.safetensors", "t2v", without=("noise",))
    make_case(folders / "second" / "bad_window.safetensors", "t2v", window_frames="1")
    (folders / "second" / "cut_off.safetensors").write_bytes(b"\x10")
    code, lines = run("parity.py", folders / "second")
    cases = lines_of(lines)
    assert code == 1 and lines[-1] == "1 passed, 6 failed"
    assert cases["second/good"][1] == "pass"
    assert cases["second/off"] == (pytest.approx(1.5e-5, rel=0.2), "FAIL")
    assert cases["second/nan"] == (float("inf"), "FAIL")
    assert cases["second/shorter"][1].startswith("FAIL")
    assert cases["second/no_noise"][1] == "FAIL (KeyError: 'noise')"
    assert cases["second/bad_window"][1].startswith("FAIL (ValueError: the window (1 latent frames) is smaller than one chunk (2)")
    assert cases["second/cut_off"][1].startswith("FAIL (SafetensorError: ")


def test_a_bare_python_hands_over_to_comfyuis(folders, checkout, comfyui_path):
    """-S leaves site-packages out, so neither torch nor pytest is there."""
    make_case(folders / "second" / "good.safetensors", "t2v")
    environment = os.environ | {"COMFYUI_PATH": str(comfyui_path), "COMFYUI_PYTHON": sys.executable}
    command = [sys.executable, "-S", "tests/parity.py", str(folders / "second")]
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "1 passed, 0 failed", done.stderr[-2000:]


def test_it_needs_no_pytest(folders, checkout, comfyui_path):
    make_case(folders / "second" / "good.safetensors", "t2v")
    code = "import runpy, sys; sys.modules['pytest'] = None; sys.argv.pop(0); runpy.run_path(sys.argv[0], run_name='__main__')"
    environment = os.environ | {"COMFYUI_PATH": str(comfyui_path)}
    command = [sys.executable, "-c", code, "tests/parity.py", str(folders / "second")]
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "1 passed, 0 failed", done.stderr[-2000:]


def test_nothing_to_run_is_no_success(tmp_path, run):
    code, lines = run("parity.py", tmp_path)
    assert code == 1 and "no model.safetensors in it or right below it" in lines[0] and lines[-1] == "0 passed, 0 failed"


def test_without_a_folder_it_explains_itself(run):
    code, lines = run("parity.py")
    assert code == 2 and any("python tests/parity.py DIR [DIR ...]" in line for line in lines)


def test_nothing_is_frozen_while_a_reference_case_fails(folders, run):
    make_case(folders / "second" / "off.safetensors", "t2v", off_by=2e-5)
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in DATA.iterdir()}
    code, lines = run("freeze_cases.py", "--write", folders / "second")
    assert code == 1 and "nothing is written" in lines[-1]
    assert {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in DATA.iterdir()} == before
    assert torch.isfinite(read(DATA / "t2v.safetensors")[1]).all()
