"""The single table of what can run where, and the choice from it; the implementations live in their operation's folder.

A Problem says WHAT is wanted, an Impl says HOW. "auto" may change HOW, never WHAT: a format or a sparsity that no row
can compute is refused, not replaced. A row asked for by name runs or raises with its reason.
"""

import importlib
import importlib.machinery
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import torch

from .arch import arch_name


@dataclass(frozen=True)
class Problem:
    """One attention call without its tensors; hashable, so it also keys caches of plans and compiled kernels."""

    q_len: int
    k_len: int
    heads: int
    head_dim: int
    dtype: torch.dtype
    device: str  # torch device type: "cuda", "cpu", ...
    batch: int = 1
    kv_heads: int | None = None  # None: as many as heads
    scale: float | None = None  # None: head_dim ** -0.5
    needs_grad: bool = False
    kv_format: str = "plain"  # "plain": k and v are tensors in dtype
    sparsity: str = "none"

    @property
    def is_grouped(self) -> bool:
        """Fewer key heads than query heads."""
        return self.kv_heads is not None and self.kv_heads != self.heads

    @property
    def softmax_scale(self) -> float:
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def flops(self) -> int:
        """Multiplications and additions of the two matrix products."""
        return 4 * self.batch * self.heads * self.q_len * self.k_len * self.head_dim

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"{self.batch} x {self.heads} heads x {self.q_len} queries x {self.k_len} keys x {self.head_dim}, "
            f"{dtype} on {self.device}"
        )


@dataclass(frozen=True)
class Impl:
    """One row: a named way to compute an operation, and everything that can keep it from running.

    target: "module:function" inside this package, imported on first use.
    archs: exact architectures (never "and newer"), None for any device.
    needs: modules that must be installed; looked up, not imported.
    refuses: what about the problem it cannot do, or None.
    probe: "module:function" that imports the optional package and returns None or what is wrong with it; it runs last,
        once, and only where everything else allows the row.
    auto_archs: where "auto" takes it, None for every architecture it runs on. Elsewhere it runs when asked for by name.
    not_auto: why "auto" leaves it alone outside auto_archs.
    """

    name: str
    target: str
    archs: tuple[int | str, ...] | None = None
    needs: tuple[str, ...] = ()
    refuses: Callable[[Problem], str | None] | None = None
    probe: str | None = None
    auto_archs: tuple[int | str, ...] | None = None
    not_auto: str = ""

    def reason(self, problem: Problem, arch: int | str) -> str | None:
        """None when it can run, else a sentence saying why not."""
        if self.archs is not None and arch not in self.archs:
            runs_on = ", ".join(arch_name(a) for a in self.archs)
            return f"runs on {runs_on}; this device is {arch_name(arch)}"
        for module in self.needs:
            if not is_installed(module):
                return f"module {module} is not installed"
        if self.refuses is not None and (reason := self.refuses(problem)) is not None:
            return reason
        return _probed(self.probe) if self.probe else None

    def is_automatic(self, arch: int | str) -> bool:
        return self.auto_archs is None or arch in self.auto_archs

    def load(self) -> Callable:
        """The function; imports its module on first use."""
        return _import(self.target)


class NoImplementation(RuntimeError):
    """Nothing in the table can do what was asked; the message gives the reason of every row that was considered."""


def select(
    op: str, problem: Problem, arch: int | str, want: str = "auto", without: Mapping[str, str] | None = None
) -> Impl:
    """The row that will run: the first one "auto" may take, or exactly the one named.

    without: rows that are out for a reason found at run time (row name -> sentence).
    Raises NoImplementation when there is none, ValueError for a name that is not in the table.
    """
    reasons = {**explain(op, problem, arch), **(without or {})}
    if want != "auto":
        if want not in reasons:
            raise ValueError(f'no {op} is called "{want}"; there are: auto, {", ".join(reasons)}')
        if reasons[want] is not None:
            runs = [name for name, reason in reasons.items() if reason is None]
            instead = f"what can run here: {', '.join(runs)}" if runs else "nothing in the table can run it here"
            raise NoImplementation(f'{op} "{want}" cannot compute {problem}: {reasons[want]}; {instead}')
        return next(impl for impl in OPS[op] if impl.name == want)
    for impl in OPS[op]:
        if reasons[impl.name] is None and impl.is_automatic(arch):
            return impl
    rows = "; ".join(f"{impl.name}: {reasons[impl.name] or impl.not_auto}" for impl in OPS[op])
    raise NoImplementation(f"no {op} can compute {problem} on {arch_name(arch)}: {rows}")


def explain(op: str, problem: Problem, arch: int | str) -> dict[str, str | None]:
    """Every row's name -> None when it can run, else why not; in the table's order, fastest first."""
    return {impl.name: impl.reason(problem, arch) for impl in OPS[op]}


def names(op: str) -> tuple[str, ...]:
    """The names of an operation's rows, fastest first."""
    return tuple(impl.name for impl in OPS[op])


@cache
def is_installed(module: str) -> bool:
    """Whether a (dotted) module can be found, without importing it or its parents.

    importlib.util.find_spec would import the parents, and flash_attn of an older generation loads a CUDA extension.
    """
    path = None
    parts = module.split(".")
    for end in range(1, len(parts) + 1):
        name = ".".join(parts[:end])
        if end == 1:
            spec = importlib.util.find_spec(name)
        else:
            spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None:
            return False
        path = spec.submodule_search_locations
        if path is None and end < len(parts):
            return False
    return True


@cache
def _probed(target: str) -> str | None:
    return _import(target)()


def _import(target: str) -> Callable:
    module, function = target.split(":")
    return getattr(importlib.import_module(f".{module}", __package__), function)


def _not_dense(problem: Problem) -> str | None:
    """What a dense row without low-bit operands cannot do."""
    if problem.kv_format != "plain":
        return f'K and V must be plain tensors, got kv_format "{problem.kv_format}"'
    if problem.sparsity != "none":
        return f'computes every key, got sparsity "{problem.sparsity}"'
    return None


def _not_half_dense(problem: Problem, max_head_dim: int) -> str | None:
    if problem.dtype not in (torch.float16, torch.bfloat16):
        return f"takes float16 and bfloat16, got {str(problem.dtype).removeprefix('torch.')}"
    if problem.head_dim % 8 or not 8 <= problem.head_dim <= max_head_dim:
        return f"head_dim must be a multiple of 8 from 8 to {max_head_dim}, got {problem.head_dim}"
    if problem.q_len == 0 or problem.k_len == 0:
        return f"needs at least one query and one key, got {problem.q_len} and {problem.k_len}"
    return _not_dense(problem)


def _not_flash_attn_4(problem: Problem) -> str | None:
    if problem.needs_grad:
        return "this adapter is for inference; gradients were asked for"
    return _not_half_dense(problem, 128)


def _not_cudnn(problem: Problem) -> str | None:
    if problem.is_grouped:
        return f"needs as many key heads as query heads, got {problem.kv_heads} and {problem.heads}"
    if problem.k_len == 1:
        return f"takes two keys or more, got {problem.k_len}"  # cuDNN 9.19 through torch 2.11 on sm_90: no kernel
    return _too_many_batches(problem) or _not_half_dense(problem, 128)


def _not_torch_flash(problem: Problem) -> str | None:
    return _too_many_batches(problem) or _not_half_dense(problem, 256)


def _not_torch(problem: Problem) -> str | None:
    return _too_many_batches(problem) or _not_dense(problem)


def _too_many_batches(problem: Problem) -> str | None:
    # A CUDA launch takes 65,535 blocks along the axis that torch's kernels give to the batch.
    if problem.device == "cuda" and problem.batch >= 2**15:
        return f"takes fewer than {2**15} batch entries on a GPU, got {problem.batch}"
    return None


# sm_87 and sm_110 are the embedded parts (Orin, Thor).
_AMPERE_AND_LATER = (80, 86, 87, 89, 90, 100, 103, 110, 120, 121)

OPS: dict[str, tuple[Impl, ...]] = {  # fastest first
    "attention": (
        # The package calls itself "for Hopper and Blackwell GPUs"; it was timed against cuDNN on sm_90, and its authors
        # publish sm_100. On the others nobody here has, so it runs there by name only.
        Impl(
            "flash-attn-4",
            "attention.flash_attn_4:attention",
            archs=(90, 100, 103, 110, 120, 121),
            needs=("flash_attn.cute", "cutlass", "quack", "tvm_ffi"),
            refuses=_not_flash_attn_4,
            probe="attention.flash_attn_4:unavailable",
            auto_archs=(90, 100, 103),
            not_auto="not measured on this architecture, so auto leaves it alone",
        ),
        Impl(
            "cudnn",
            "attention.torch_sdpa:cudnn",
            archs=_AMPERE_AND_LATER,
            refuses=_not_cudnn,
            probe="attention.torch_sdpa:cudnn_unavailable",
            auto_archs=(90, 100, 103),
            not_auto="not measured on this architecture, so auto lets torch choose",
        ),
        Impl("torch", "attention.torch_sdpa:attention", refuses=_not_torch),
        Impl(
            "torch-flash",
            "attention.torch_sdpa:flash",
            archs=_AMPERE_AND_LATER,
            refuses=_not_torch_flash,
            auto_archs=(),
            not_auto="torch takes it by itself where it is the best it has",
        ),
        Impl(
            "reference",
            "attention.reference:attention",
            refuses=_not_dense,
            auto_archs=(),
            not_auto="exact but slow; it is there to check the others",
        ),
    ),
}
