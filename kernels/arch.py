"""Names the architecture that kernels run on or are compiled for; what each one can run is said in dispatch.py."""

import os
import re

import torch

ARCH_VARIABLE = "LONGLIVE_ARCH"


def parse_arch(text: str) -> int:
    """The SM number in "90", "sm_90", "sm_90a", "9.0" or "10.3"; ValueError for anything else."""
    match = re.fullmatch(r"(?:sm_?)?(?:(\d{2,3})|(\d{1,2})\.(\d))[af]?", text.strip().lower())
    if match is None:
        raise ValueError(f"an architecture reads like 90, sm_90a or 9.0; got {text!r}")
    whole, major, minor = match.groups()
    return int(whole) if whole else int(major) * 10 + int(minor)


def arch_of(device: torch.device | str | None = None) -> int | str:
    """The exact SM number of an NVIDIA device (75, 80, 86, 89, 90, 100, 103, 120, 121, ...), else a word.

    device: where the tensors live. None means the machine's first NVIDIA device, or "cpu".
    Returns "hip" for an AMD device and the torch device type ("cpu", "mps", "xpu", ...) otherwise.

    The environment variable LONGLIVE_ARCH replaces the number for NVIDIA devices and for None, so that kernels
    can be compiled, and their selection tested, for a GPU that is not present. A CPU stays a CPU.
    """
    kind = None if device is None else torch.device(device).type
    if kind in (None, "cuda"):
        override = os.environ.get(ARCH_VARIABLE)
        if override:
            return parse_arch(override)
    if kind is None:
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind != "cuda":
        return kind
    if torch.version.hip is not None:
        return "hip"
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor


def arch_name(arch: int | str) -> str:
    """"sm_90" for 90; a word stays as it is."""
    return f"sm_{arch}" if isinstance(arch, int) else arch
