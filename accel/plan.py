"""Turns what was asked for, a problem and a device into a Plan: the implementation chosen once, with the reasons."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ..kernels.arch import arch_name
from ..kernels.dispatch import NoImplementation, Problem, explain, names, select
from .report import Line

# Who computes a call that none of ours takes.
HOST = "ComfyUI"


@dataclass(frozen=True)
class AttentionRequest:
    """What the user asked for. mode: "off", "auto", or the name of one row of the capability table."""

    mode: str = "auto"

    def __post_init__(self) -> None:
        known = ("off", "auto", *names("attention"))
        if self.mode not in known:
            raise ValueError(f'attention must be one of {", ".join(known)}; got "{self.mode}"')

    @property
    def is_off(self) -> bool:
        return self.mode == "off"


@dataclass(frozen=True)
class Plan:
    """Who computes a problem, and why. rows: every row of the table -> None when it can run here, else why not."""

    requested: str
    effective: str
    why: str
    problem: Problem
    arch: int | str
    rows: Mapping[str, str | None]
    # (q, k, v, *, problem) -> out, all (B, N, heads, head_dim); None: the call goes on to the host.
    function: Callable | None = field(compare=False, repr=False)

    @property
    def line(self) -> Line:
        return Line("attention", self.requested, self.effective, self.why)

    def explain(self) -> tuple[str, ...]:
        """A sentence per row of the table."""
        return tuple(
            f"{name}: {reason or ('chosen' if name == self.effective else 'can run here')}"
            for name, reason in self.rows.items()
        )


def make_plan(
    request: AttentionRequest, problem: Problem, arch: int | str, without: Mapping[str, str] | None = None
) -> Plan:
    """Choose who computes the problem.

    without: rows that failed while running, with the reason; "auto" then takes the next one.
    "off" and an "auto" that finds nothing give the call to the host; a row asked for by name that cannot run raises
    NoImplementation with its reason.
    """
    rows = {**explain("attention", problem, arch), **(without or {})}
    here = f"{str(problem.dtype).removeprefix('torch.')} and head_dim {problem.head_dim} on {arch_name(arch)}"

    def plan(effective: str, why: str, function: Callable | None = None) -> Plan:
        return Plan(request.mode, effective, why, problem, arch, rows, function)

    if request.is_off:
        return plan(HOST, "attention is off")
    try:
        impl = select("attention", problem, arch, request.mode, without)
    except NoImplementation as error:
        if request.mode != "auto":
            raise
        return plan(HOST, str(error))
    if request.mode != "auto":
        return plan(impl.name, "asked for by name", impl.load())
    faster = [f"{name}: {rows[name]}" for name in names("attention")[: names("attention").index(impl.name)] if rows[name]]
    why = f"the fastest that auto takes for {here}"
    return plan(impl.name, "; not ".join([why, *faster]), impl.load())
