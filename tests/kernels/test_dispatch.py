"""kernels.dispatch: the table, select and explain."""

import dataclasses
import subprocess
import sys

import pytest
import torch
from longlive.kernels import dispatch
from longlive.kernels.dispatch import OPS, NoImplementation, Problem, explain, is_installed, names, select

WINDOW = Problem(q_len=7040, k_len=28160, heads=24, head_dim=128, dtype=torch.bfloat16, device="cuda")
TINY = Problem(q_len=12, k_len=24, heads=2, head_dim=64, dtype=torch.float32, device="cpu")


@pytest.fixture
def everything_installed(monkeypatch):
    """A machine that has every optional package, and packages that import."""
    monkeypatch.setattr(dispatch, "is_installed", lambda module: True)
    monkeypatch.setattr(dispatch, "_probed", lambda target: None)


def test_every_row_explains_itself_on_a_cpu():
    reasons = explain("attention", TINY, "cpu")
    assert tuple(reasons) == names("attention")
    assert {name for name, reason in reasons.items() if reason is None} == {"torch", "reference"}
    assert reasons["flash-attn-4"].endswith("this device is cpu")
    assert reasons["cudnn"].endswith("this device is cpu")
    assert select("attention", TINY, "cpu").name == "torch"


def test_every_entry_is_exact():
    """No row runs on an architecture it does not list: 101 and 91 are in nobody's list, 103 is its own entry."""
    for rows in OPS.values():
        for impl in rows:
            if impl.archs is not None:
                assert len(set(impl.archs)) == len(impl.archs)
                for absent in (75, 91, 101, 122):
                    assert impl.reason(WINDOW, absent).endswith(f"this device is sm_{absent}")
            assert set(impl.auto_archs or ()) <= set(impl.archs or impl.auto_archs or ())
            assert impl.auto_archs is None or impl.not_auto, f"{impl.name} says nowhere why auto leaves it alone"


@pytest.mark.parametrize(
    "arch, chosen",
    [
        *((arch, "torch") for arch in (75, 80, 86, 89, 120, 121, "hip", "mps")),
        *((arch, "flash-attn-4") for arch in (90, 100, 103)),
    ],
)
def test_auto_with_everything_installed(everything_installed, arch, chosen):
    assert select("attention", WINDOW, arch).name == chosen


def test_auto_on_hopper_without_flash_attn_4_takes_cudnn(monkeypatch):
    monkeypatch.setattr(dispatch, "is_installed", lambda module: module != "flash_attn.cute")
    monkeypatch.setattr(dispatch, "_probed", lambda target: None)
    assert select("attention", WINDOW, 90).name == "cudnn"
    assert explain("attention", WINDOW, 90)["flash-attn-4"] == "module flash_attn.cute is not installed"


def test_an_installed_package_that_does_not_import_is_a_reason_not_a_crash(monkeypatch):
    monkeypatch.setattr(dispatch, "is_installed", lambda module: True)
    monkeypatch.setitem(sys.modules, "flash_attn", None)  # importing it raises
    dispatch._probed.cache_clear()
    try:
        reason = explain("attention", WINDOW, 90)["flash-attn-4"]
    finally:
        dispatch._probed.cache_clear()
    assert reason.startswith("flash-attn-4 is installed but does not import: ModuleNotFoundError")


def test_auto_changes_how_but_never_what(everything_installed):
    for change in ({"kv_format": "nvfp4"}, {"sparsity": "losa"}):
        wanted = dataclasses.replace(WINDOW, **change)
        with pytest.raises(NoImplementation) as error:
            select("attention", wanted, 90)
        (value,) = change.values()
        for name in names("attention"):
            assert f"{name}: " in str(error.value)
        assert f'"{value}"' in str(error.value)


def test_a_name_that_cannot_run_raises_with_its_reason_and_what_would():
    with pytest.raises(NoImplementation, match=r'"cudnn" cannot compute .*12 queries x 24 keys.*this device is cpu; what can run here: torch, reference'):
        select("attention", TINY, "cpu", want="cudnn")
    with pytest.raises(ValueError, match="no attention is called \"flash\"; there are: auto, flash-attn-4, cudnn"):
        select("attention", TINY, "cpu", want="flash")


def test_a_row_that_failed_at_run_time_is_out(everything_installed):
    assert select("attention", WINDOW, 90, without={"flash-attn-4": "failed"}).name == "cudnn"
    with pytest.raises(NoImplementation, match="did not compile"):
        select("attention", WINDOW, 90, want="flash-attn-4", without={"flash-attn-4": "did not compile"})


def test_refusals_name_the_value(everything_installed):
    reasons = explain("attention", dataclasses.replace(WINDOW, dtype=torch.float32), 90)
    assert reasons["cudnn"] == "takes float16 and bfloat16, got float32"
    assert reasons["torch"] is None
    assert explain("attention", dataclasses.replace(WINDOW, head_dim=132), 90)["flash-attn-4"].endswith("got 132")
    assert explain("attention", dataclasses.replace(WINDOW, k_len=0), 90)["cudnn"].endswith("got 7040 and 0")
    assert "gradients" in explain("attention", dataclasses.replace(WINDOW, needs_grad=True), 90)["flash-attn-4"]
    assert explain("attention", dataclasses.replace(WINDOW, kv_heads=8), 90)["cudnn"].endswith("got 8 and 24")
    many = explain("attention", dataclasses.replace(WINDOW, batch=2**15), 90)
    assert many["torch"].endswith("got 32768") and many["reference"] is None


def test_every_target_of_the_table_exists():
    for rows in OPS.values():
        for impl in rows:
            assert callable(impl.load())
            if impl.probe:
                assert callable(dispatch._import(impl.probe))


def test_problems_are_keys():
    assert {WINDOW: 1}[dataclasses.replace(WINDOW)] == 1
    assert dataclasses.replace(WINDOW, k_len=14080) != WINDOW
    assert WINDOW.flops == 4 * 24 * 7040 * 28160 * 128
    assert (WINDOW.softmax_scale, dataclasses.replace(WINDOW, scale=0.5).softmax_scale) == (128**-0.5, 0.5)


def test_is_installed_looks_without_importing(tmp_path, monkeypatch):
    """A parent package whose import fails (an old flash_attn without its CUDA library) must not stop the look-up."""
    package = tmp_path / "longlive_probe_package"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('no CUDA library')\n")
    (package / "inner" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    is_installed.cache_clear()
    assert is_installed("longlive_probe_package.inner")
    assert not is_installed("longlive_probe_package.absent")
    assert not is_installed("longlive_absent_package.inner")
    assert not is_installed("antigravity.inner")
    assert "longlive_probe_package" not in sys.modules
    is_installed.cache_clear()


def test_importing_kernels_loads_no_optional_package(checkout):
    code = (
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('longlive', r'{checkout / 'kernels' / '__init__.py'}', submodule_search_locations=[r'{checkout}'])\n"
        "package = importlib.util.module_from_spec(spec); sys.modules['longlive'] = package\n"
        "import longlive.kernels.dispatch as d, longlive.kernels.attention\n"
        "import torch\n"
        "d.explain('attention', d.Problem(1, 1, 1, 64, torch.float32, 'cpu'), 'cpu')\n"
        "heavy = {'cutlass', 'flash_attn', 'quack', 'tvm_ffi', 'triton', 'comfy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
