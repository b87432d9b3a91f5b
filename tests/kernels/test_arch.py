"""kernels.arch: names of architectures and the override that stands in for a GPU."""

import pytest
import torch
from longlive.kernels.arch import ARCH_VARIABLE, arch_name, arch_of, parse_arch


@pytest.mark.parametrize(
    "text, number",
    [("90", 90), ("sm_90a", 90), ("sm90", 90), ("9.0", 90), ("10.3", 103), ("SM_100a", 100), ("sm_120f", 120), ("7.5", 75), (" 8.6 ", 86)],
)
def test_parse_arch_reads_every_usual_spelling(text, number):
    assert parse_arch(text) == number


@pytest.mark.parametrize("text", ["hopper", "sm_", "9", "9.0.0", "compute_90", "1000"])
def test_parse_arch_refuses_with_what_it_got(text):
    with pytest.raises(ValueError, match=f"got '{text}'"):
        parse_arch(text)


def test_the_override_names_a_gpu_that_is_not_there(monkeypatch):
    monkeypatch.setenv(ARCH_VARIABLE, "sm_100a")
    assert arch_of() == 100
    assert arch_of("cuda") == 100
    assert arch_of("cuda:1") == 100


def test_the_override_never_turns_a_cpu_into_a_gpu(monkeypatch):
    """Tensors on the CPU must not be handed to a CUDA kernel because someone compiles for one."""
    monkeypatch.setenv(ARCH_VARIABLE, "90")
    assert arch_of("cpu") == "cpu"
    assert arch_of(torch.zeros(1).device) == "cpu"


def test_other_devices_are_words(monkeypatch):
    monkeypatch.delenv(ARCH_VARIABLE, raising=False)
    assert arch_of("cpu") == "cpu"
    assert arch_of("mps") == "mps"
    assert arch_of("meta") == "meta"
    assert (arch_name(90), arch_name("cpu")) == ("sm_90", "cpu")


def test_the_exact_capability_counts(monkeypatch):
    """10.3 is not 10.0: the table has exact entries and must be asked with the exact number."""
    monkeypatch.delenv(ARCH_VARIABLE, raising=False)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, 3))
    assert arch_of("cuda:0") == 103
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert arch_of("cuda:0") == "hip"
