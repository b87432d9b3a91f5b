"""The attention override: takes the host's attention calls, computes those it can, hands the rest down the chain.

Torch only. The host's convention is a callable (func, q, k, v, heads, ..., **options) kept in one slot of the
transformer options; func is the host's own attention. Whoever takes the slot is expected to keep the callable that was
there and to call it when declining. Some do not, and some take the slot again before every model call.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType, ModuleType

import torch
from torch import Tensor

from ..kernels.arch import arch_of
from ..kernels.attention import problem_of
from ..kernels.dispatch import NoImplementation, Problem
from .plan import HOST, AttentionRequest, Plan, make_plan
from .report import Call, CallCounts

log = logging.getLogger(__name__)

SLOT = "optimized_attention_override"
# Says in the transformer options which override of ours may act on this model, where several are in the chain.
ACTING = "longlive_acting_override"
# Our own forward describes its calls here.
TAG = "longlive"

_PARAMETERS = ("q", "k", "v", "heads", "mask", "attn_precision", "skip_reshape", "skip_output_reshape")
# Honoured or without effect on dense attention: low_precision_attention=False asks for exactly what every row does.
_OPTIONS = frozenset(
    (*_PARAMETERS, "transformer_options", "_inside_attn_wrapper", "scale", "enable_gqa", "low_precision_attention")
)


class AttentionOverride:
    """Computes attention calls as its request says. One object per node, in the slot at most once.

    base: the override found in the slot when this one was put there; it gets the calls that this one declines.
    """

    def __init__(self, request: AttentionRequest, base: Callable | None = None) -> None:
        self.request = request
        self.base = base
        self.counts = CallCounts()
        self.failed: dict[str, str] = {}  # row -> what it raised; not tried again by this object
        self.plans: dict[tuple[Problem, torch.device], Plan] = {}
        self.retakes = 0  # how often the slot had to be taken back in this run
        self._later: Callable | None = None  # what took the slot after us and did not keep us
        self._depth = threading.local()

    def start_run(self) -> None:
        self.counts.clear()
        self.retakes = 0
        self._later = None

    def end_run(self) -> None:
        # Another node's callable may hold a model; nothing of a run is kept but numbers.
        self._later = None

    def hold_slot(self, options: dict) -> bool:
        """Before a model call: be in the chain of these transformer options. True when the slot had to be taken.

        A callable that visibly leads to this object keeps the slot. Otherwise this object takes it and keeps the
        callable for what it declines. That callable may lead here after all, out of sight; __call__ then goes on to
        base, so the chain has a fixed length however often two such nodes take the slot from each other.
        """
        options[ACTING] = self
        current = options.get(SLOT)
        if current is self or (current is not None and leads_to(current, self)):
            return False
        self._later = current
        self.retakes += 1
        options[SLOT] = self
        return True

    def __call__(self, func: Callable, *args, **kwargs) -> Tensor:
        """One attention call of the host; its parameters are _PARAMETERS, by position or by name."""
        options = kwargs.get("transformer_options") or {}
        if getattr(self._depth, "value", 0) or options.get(ACTING, self) is not self:
            return self._hand_down(func, args, kwargs)
        tensors = read_call(args, kwargs)
        call = describe(tensors, options.get(TAG))
        if self.request.is_off:
            reason = "attention is off"
        elif isinstance(tensors, str):
            reason = tensors
        else:
            plan = self._plan(tensors)
            while plan.function is not None:
                try:
                    out = plan.function(tensors.q, tensors.k, tensors.v, problem=tensors.problem)
                except torch.OutOfMemoryError:
                    raise  # the next row would not need less; the host frees memory and reports
                except Exception as error:
                    plan = self._plan_after(plan, error, tensors)
                else:
                    self.counts.add(call, plan.effective)
                    return tensors.shape_output(out)
            reason = plan.why
        self.counts.add(call, HOST if self.base is None and self._later is None else "another override", reason)
        return self._hand_down(func, args, kwargs)

    def _plan(self, tensors: "HostCall") -> Plan:
        key = (tensors.problem, tensors.q.device)
        plan = self.plans.get(key)
        if plan is None:
            plan = self.plans[key] = make_plan(self.request, key[0], arch_of(key[1]), without=self.failed)
        return plan

    def _plan_after(self, plan: Plan, error: Exception, tensors: "HostCall") -> Plan:
        """The plan once a row has raised: the next row for "auto"; a row asked for by name ends the run."""
        what = f"failed on this machine with {type(error).__name__}: {error}"
        if self.request.mode != "auto":
            raise NoImplementation(
                f'attention "{plan.effective}" {what} (computing {plan.problem}); '
                'attention "auto" takes another one when that happens'
            ) from error
        log.warning("attention %s %s; the next one is taken", plan.effective, what)
        self.failed[plan.effective] = what
        self.plans.clear()
        return self._plan(tensors)

    def _hand_down(self, func: Callable, args: tuple, kwargs: dict) -> Tensor:
        """Give a call to whoever comes next.

        First what took the slot later, then, when that leads back here, what was there before, then the host: a call
        ends after three visits at most, whatever the others do with the slot.
        """
        depth = getattr(self._depth, "value", 0)
        acting = (kwargs.get("transformer_options") or {}).get(ACTING, self) is self
        if depth == 0 and acting and self._later is not None:
            following = self._later
        else:
            following = self.base if depth < 2 else None
        self._depth.value = depth + 1
        try:
            return func(*args, **kwargs) if following is None else following(func, *args, **kwargs)
        finally:
            self._depth.value = depth


@dataclass(frozen=True)
class HostCall:
    """The tensors of one call as (B, N, heads, head_dim) views, and how the host wants the answer."""

    q: Tensor
    k: Tensor
    v: Tensor
    problem: Problem
    keeps_heads: bool  # answer (B, heads, N, head_dim) instead of (B, N, heads * head_dim)

    def shape_output(self, out: Tensor) -> Tensor:
        return out.transpose(1, 2) if self.keeps_heads else out.flatten(2)


def read_call(args: tuple, kwargs: dict) -> HostCall | str:
    """The call's tensors and problem, or the reason why it cannot be taken."""
    values = {**dict(zip(_PARAMETERS, args)), **kwargs}
    unknown = sorted(values.keys() - _OPTIONS)
    if unknown or len(args) > len(_PARAMETERS):
        return f"the call carries an option that is not known here: {', '.join(unknown) or 'one more by position'}"
    q, k, v, heads = (values.get(name) for name in _PARAMETERS[:4])
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor) and isinstance(heads, int)):
        return "q, k, v and heads are not three plain tensors and a number"
    if values.get("mask") is not None:
        return "the call carries a mask"
    precision = values.get("attn_precision")
    if precision is not None and precision != q.dtype:
        return f"the call asks for {str(precision).removeprefix('torch.')} inside"
    if values.get("skip_reshape"):  # (B, heads, N, head_dim)
        if q.ndim != 4 or q.shape[1] != heads:
            return f"q is {tuple(q.shape)}, not (B, {heads}, N, head_dim)"
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    else:  # (B, N, heads * head_dim)
        if not q.ndim == k.ndim == v.ndim == 3 or q.shape[-1] % heads:
            return f"q is {tuple(q.shape)}, not (B, N, {heads} * head_dim)"
        head_dim = q.shape[-1] // heads
        if k.shape[-1] % head_dim or v.shape[-1] % head_dim:
            return f"k and v have {k.shape[-1]} and {v.shape[-1]} channels, not a multiple of head_dim {head_dim}"
        q, k, v = (t.view(t.shape[0], t.shape[1], t.shape[2] // head_dim, head_dim) for t in (q, k, v))
    if k.shape[2] != heads and not values.get("enable_gqa"):
        return f"k has {k.shape[2]} heads and q {heads}, without enable_gqa"
    try:
        problem = problem_of(q, k, v, values.get("scale"))
    except ValueError as error:
        return str(error)
    return HostCall(q, k, v, problem, bool(values.get("skip_output_reshape")))


def describe(tensors: HostCall | str, tag: dict | None) -> Call:
    """What is counted about a call. Without our forward's tag, equal lengths are taken for self-attention."""
    if isinstance(tensors, str):
        return Call((tag or {}).get("kind", "self"), tag is not None, None, False)
    p = tensors.problem
    kind = tag["kind"] if tag else ("self" if p.q_len == p.k_len else "cross")
    dtype = str(p.dtype).removeprefix("torch.")
    shape = f"{p.batch}x{p.heads}x{p.q_len}x{p.k_len}x{p.head_dim} {dtype}"
    return Call(kind, tag is not None, shape, kind == "self" and p.q_len != p.k_len)


def leads_to(start: object, goal: object, limit: int = 2000) -> bool:
    """Whether goal can be found inside a callable: closures, defaults, attributes, partials, containers.

    Looks at up to `limit` objects and runs no foreign code. Models are not entered: a callable that holds a model whose
    options name the goal does not call it because of that. False means "not seen".
    """
    seen: dict[int, object] = {}
    queue = deque([start])
    while queue and len(seen) < limit:
        item = queue.popleft()
        if item is goal:
            return True
        if id(item) not in seen:
            seen[id(item)] = item
            queue.extend(_parts(item))
    return False


_CLOSED = (str, bytes, int, float, complex, type(None), type, ModuleType, Tensor, torch.nn.Module)


def _parts(item: object) -> Iterator[object]:
    if isinstance(item, _CLOSED):
        return
    if isinstance(item, FunctionType):
        for cell in item.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # a variable that is not assigned yet
                continue
        yield from item.__defaults__ or ()
        yield from (item.__kwdefaults__ or {}).values()
        yield from item.__dict__.values()
    elif isinstance(item, MethodType):
        yield from (item.__self__, item.__func__)
    elif isinstance(item, partial):
        yield from (item.func, item.args, item.keywords)
    elif isinstance(item, dict):
        yield from item.values()
    elif isinstance(item, list | tuple | set | frozenset | deque):
        yield from item
    else:
        attributes = getattr(item, "__dict__", {})
        if "model_options" not in attributes:  # a model patcher of any class
            yield from attributes.values()
