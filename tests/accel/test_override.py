"""accel.override: which attention calls are taken, what becomes of the others, and how the chain of overrides stays sound."""

import functools
import gc
import sys
import threading
import weakref

import pytest
import torch
from longlive.accel.override import ACTING, SLOT, TAG, AttentionOverride, leads_to
from longlive.accel.plan import HOST, AttentionRequest
from longlive.kernels import dispatch
from longlive.kernels.dispatch import Impl, NoImplementation

HEADS, HEAD_DIM = 2, 16


def host(q, k, v, heads, mask=None, attn_precision=None, skip_reshape=False, skip_output_reshape=False, **kwargs):
    """The host's attention, in the host's convention."""
    host.calls.append((heads, mask, kwargs))
    if not skip_reshape:
        q, k, v = (t.unflatten(-1, (-1, q.shape[-1] // heads)).transpose(1, 2) for t in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, scale=kwargs.get("scale"), enable_gqa=kwargs.get("enable_gqa", False)
    )
    return out if skip_output_reshape else out.transpose(1, 2).flatten(2)


host.calls = []


@pytest.fixture(autouse=True)
def fresh_host():
    host.calls.clear()


def tensors(q_len=6, k_len=10, batch=2, kv_heads=HEADS):
    generator = torch.Generator().manual_seed(q_len + k_len)
    q = torch.randn(batch, q_len, HEADS * HEAD_DIM, generator=generator)
    k, v = torch.randn(2, batch, k_len, kv_heads * HEAD_DIM, generator=generator)
    return q, k, v


def by_heads(*flat):
    return [t.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for t in flat]


def auto(**kwargs) -> AttentionOverride:
    return AttentionOverride(AttentionRequest("auto"), **kwargs)


CONVENTIONS = {
    "by position": lambda q, k, v: ((q, k, v, HEADS), {}),
    "by name": lambda q, k, v: ((q, k, v), {"heads": HEADS}),
    "with heads": lambda q, k, v: ((*by_heads(q, k, v), HEADS), {"skip_reshape": True}),
    "heads out": lambda q, k, v: ((q, k, v, HEADS), {"skip_output_reshape": True}),
    "heads in and out": lambda q, k, v: ((*by_heads(q, k, v), HEADS), {"skip_reshape": True, "skip_output_reshape": True}),
    "scaled": lambda q, k, v: ((q, k, v, HEADS), {"scale": 0.05}),
    "empty options": lambda q, k, v: ((q, k, v, HEADS, None, None), {"_inside_attn_wrapper": True, "low_precision_attention": False}),
    "own precision": lambda q, k, v: ((q, k, v, HEADS), {"attn_precision": torch.float32}),
}


@pytest.mark.parametrize("lengths", [(6, 10), (7, 7), (1, 33)], ids=str)
@pytest.mark.parametrize("convention", CONVENTIONS)
def test_every_convention_of_the_host_is_computed_here(convention, lengths):
    args, kwargs = CONVENTIONS[convention](*tensors(*lengths))
    expected = host(*args, **kwargs)
    host.calls.clear()
    mine = auto()
    out = mine(host, *args, **kwargs)
    assert host.calls == []
    assert out.shape == expected.shape
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    assert mine.counts.implementations() == {"torch": 1}


def test_grouped_heads_are_computed_here():
    q, k, v = tensors(kv_heads=1)
    expected = host(q, k, v, HEADS, enable_gqa=True)
    mine = auto()
    torch.testing.assert_close(mine(host, q, k, v, HEADS, enable_gqa=True), expected, rtol=1e-5, atol=1e-5)
    assert mine.counts.implementations() == {"torch": 1}


DECLINED = {
    "the call carries a mask": {"mask": torch.zeros(6, 10)},
    "an option that is not known here: bias": {"bias": 1},
    "asks for float64 inside": {"attn_precision": torch.float64},
}


@pytest.mark.parametrize("reason", DECLINED)
def test_what_cannot_be_honoured_goes_on_unchanged_and_counted(reason):
    options = {"block_index": 3}
    mine = auto()
    for _ in range(3):
        mine(host, *tensors(), HEADS, transformer_options=options, _inside_attn_wrapper=True, **DECLINED[reason])
    counts = mine.counts.to_dict()
    ((found, number),) = counts["passed_on"].items()
    assert reason in found and number == 3
    assert counts["implementations"] == {HOST: 3}
    heads, mask, kwargs = host.calls[0]
    assert kwargs["transformer_options"] is options and kwargs["_inside_attn_wrapper"] is True
    assert mask is DECLINED[reason].get("mask") and kwargs.get("bias") == DECLINED[reason].get("bias")


def test_tensors_that_do_not_fit_go_on_with_a_reason():
    seen = []

    def func(*args, **kwargs):
        seen.append(args)
        return "host"

    q, k, v = tensors()
    mine = auto()
    assert mine(func, [q], k, v, HEADS) == "host"
    assert mine(func, q, k, v, 5) == "host"
    assert mine(func, q, k, v.half(), HEADS) == "host"
    assert mine(func, q, k, v[:, :-1], HEADS) == "host"
    assert mine(func, q, k[..., :HEAD_DIM], v[..., :HEAD_DIM], HEADS) == "host"
    assert mine(func, *by_heads(q, k, v), 7, skip_reshape=True) == "host"
    assert len(seen) == mine.counts.total == 6
    assert len(mine.counts.to_dict()["passed_on"]) == 6


def test_off_hands_everything_down_bit_for_bit_and_counts_it():
    mine = AttentionOverride(AttentionRequest("off"))
    q, k, v = tensors()
    assert torch.equal(mine(host, q, k, v, HEADS), host(q, k, v, HEADS))
    counts = mine.counts.to_dict()
    assert counts["passed_on"] == {"attention is off": 1} and counts["shapes"] == {"2x2x6x10x16 float32": 1}


def test_tagged_calls_are_told_apart():
    mine = auto()
    for kind, lengths in (("self", (6, 10)), ("self", (6, 6)), ("cross", (6, 6))):
        mine(host, *tensors(*lengths), HEADS, transformer_options={TAG: {"kind": kind, "layer": 0}})
    mine(host, *tensors(6, 6), HEADS, transformer_options={})
    mine(host, *tensors(6, 10), HEADS)
    counts = mine.counts.to_dict()
    assert (counts["self"], counts["cross"], counts["cached"], counts["plain"]) == (3, 2, 1, 2)


def failing(monkeypatch, error):
    """A table whose first row raises when it runs."""

    def broken(q, k, v, *, problem):
        raise error

    rows = (Impl("broken", "broken:broken"), *dispatch.OPS["attention"])
    monkeypatch.setitem(dispatch.OPS, "attention", rows)
    load = Impl.load
    monkeypatch.setattr(Impl, "load", lambda self: broken if self.name == "broken" else load(self))


def test_a_row_that_fails_is_replaced_once_and_named(monkeypatch, caplog):
    failing(monkeypatch, RuntimeError("no kernel image"))
    mine = auto()
    q, k, v = tensors()
    for _ in range(3):
        torch.testing.assert_close(mine(host, q, k, v, HEADS), host(q, k, v, HEADS), rtol=1e-5, atol=1e-5)
    assert mine.failed == {"broken": "failed on this machine with RuntimeError: no kernel image"}
    assert mine.counts.implementations() == {"torch": 3}
    (plan,) = mine.plans.values()
    assert "not broken: failed on this machine with RuntimeError: no kernel image" in plan.why
    assert len([r for r in caplog.records if "no kernel image" in r.getMessage()]) == 1


def test_a_named_row_that_fails_ends_the_run_with_a_sentence(monkeypatch):
    failing(monkeypatch, RuntimeError("no kernel image"))
    with pytest.raises(NoImplementation, match='"broken" failed on this machine with RuntimeError: no kernel image .*6 queries x 10 keys'):
        AttentionOverride(AttentionRequest("broken"))(host, *tensors(), HEADS)


def test_running_out_of_memory_is_not_hidden_by_another_row(monkeypatch):
    failing(monkeypatch, torch.OutOfMemoryError("full"))
    mine = auto()
    with pytest.raises(torch.OutOfMemoryError):
        mine(host, *tensors(), HEADS)
    assert mine.failed == {}


def masked(options, slot=None):
    """A call that nobody here computes, so it runs through the whole chain of the slot."""
    return (slot or options[SLOT])(host, *tensors(), HEADS, mask=torch.zeros(6, 10), transformer_options=options)


class Visits:
    """A foreign override that chains: counts how often a call comes by."""

    def __init__(self, previous=None):
        self.previous = previous
        self.number = 0

    def __call__(self, func, *args, **kwargs):
        self.number += 1
        return func(*args, **kwargs) if self.previous is None else self.previous(func, *args, **kwargs)


def test_what_is_declined_goes_to_the_override_that_was_there_before():
    before = Visits()
    mine = auto(base=before)
    masked({}, mine)
    assert (before.number, len(host.calls)) == (1, 1)
    assert mine.counts.implementations() == {"another override": 1}
    mine(host, *tensors(), HEADS)
    assert before.number == 1


def closure_over(previous):
    return lambda func, *args, **kwargs: previous(func, *args, **kwargs)


def default_argument(previous):
    def override(func, *args, _previous=previous, **kwargs):
        return _previous(func, *args, **kwargs)

    return override


def wrapped(previous):
    @functools.wraps(previous)
    def override(func, *args, **kwargs):
        return previous(func, *args, **kwargs)

    return override


@pytest.mark.parametrize(
    "wrap",
    [
        Visits,
        closure_over,
        default_argument,
        lambda previous: Visits(previous).__call__,
        lambda previous: functools.partial(lambda p, func, *a, **k: p(func, *a, **k), previous),
        lambda previous: closure_over(closure_over({"previous": [previous]}["previous"][0])),
    ],
    ids=["attribute", "closure", "default", "bound method", "partial", "nested"],
)
def test_an_override_that_leads_to_ours_keeps_the_slot(wrap):
    mine = auto()
    options = {SLOT: mine}
    assert mine.hold_slot(options) is False
    outer = options[SLOT] = wrap(mine)
    assert mine.hold_slot(options) is False
    assert options[SLOT] is outer
    masked(options)
    assert mine.counts.total == 1 and mine.retakes == 0


def test_an_override_that_dropped_ours_is_put_behind_it():
    mine = auto()
    usurper = Visits()
    options = {SLOT: usurper}
    assert mine.hold_slot(options) is True
    assert options[SLOT] is mine
    masked(options)
    assert usurper.number == 1
    assert mine.hold_slot(options) is False
    mine.end_run()
    mine.start_run()
    masked({SLOT: mine})
    assert usurper.number == 1, "a new run starts with the chain of its own options"


def test_an_empty_slot_is_taken():
    mine = auto(base=Visits())
    options = {}
    assert mine.hold_slot(options) is True
    masked(options)
    assert mine.base.number == 1


def test_a_callable_that_only_holds_a_model_does_not_lead_to_us():
    """Its model's options name us, but its calls never come here: we must take the slot back."""

    class Patcher:
        pass

    mine = auto()
    patcher = Patcher()
    patcher.model_options = {"transformer_options": {SLOT: mine}}
    usurper = Visits()
    usurper.model = patcher
    options = {SLOT: usurper}
    assert mine.hold_slot(options) is True


def test_leads_to_ends_on_cycles_and_at_its_limit():
    ring = []
    ring.append(ring)
    assert not leads_to(ring, object())
    goal = object()
    far = goal
    for _ in range(50):
        far = [far]
    assert leads_to(far, goal) and not leads_to(far, goal, limit=20)


class Reinstaller:
    """A foreign node that takes the slot before every model call unless it holds it, and chains blindly.

    hidden: where it keeps what was there out of sight, as compiled code would.
    """

    store = {}

    def __init__(self, hidden: bool, reuse_object: bool):
        self.hidden, self.reuse_object = hidden, reuse_object
        self.current = None
        self.number = 0
        self.store.clear()

    def prepare(self, options):
        previous = options.get(SLOT)
        if previous is self.current and previous is not None:
            return
        key = 0 if self.reuse_object else self.number
        self.number += 1
        if self.reuse_object and self.current is not None:
            self.store[key] = previous
        elif self.hidden or self.reuse_object:
            self.store[key] = previous
            store = id(self.store)
            self.current = lambda func, *a, **k: STORES[store][key](func, *a, **k) if STORES[store][key] else func(*a, **k)
        else:
            self.current = lambda func, *a, **k: previous(func, *a, **k) if previous else func(*a, **k)
        options[SLOT] = self.current


STORES = {id(Reinstaller.store): Reinstaller.store}


def frames() -> int:
    """How deep the caller is in the stack."""
    frame, depth = sys._getframe(1), 0
    while frame is not None:
        frame, depth = frame.f_back, depth + 1
    return depth


def depth_of_a_call(options) -> int:
    """Frames between the slot and the host when everyone declines."""
    deepest = []

    def func(*args, **kwargs):
        deepest.append(frames())
        return args[0]

    options[SLOT](func, *tensors(), HEADS, mask=torch.zeros(6, 10), transformer_options=options)
    return deepest[0] - frames()


@pytest.mark.parametrize("ours_first", [True, False], ids=["ours first", "theirs first"])
@pytest.mark.parametrize("reuse_object", [False, True], ids=["new callable", "same callable"])
@pytest.mark.parametrize("hidden", [False, True], ids=["visible", "hidden"])
def test_2000_calls_beside_a_foreign_reinstaller(hidden, reuse_object, ours_first):
    """Two nodes that both take the slot back and chain used to grow the chain every call: RecursionError at call 499."""
    foreign = Reinstaller(hidden, reuse_object)
    mine = auto()
    options = {SLOT: mine}
    prepare = [mine.hold_slot, foreign.prepare] if ours_first else [foreign.prepare, mine.hold_slot]
    depths = []
    for call in range(2000):
        for callback in prepare:
            callback(options)
        if call % 100 == 1 or call > 1990:
            before = mine.counts.total
            depths.append(depth_of_a_call(options))
            options[SLOT](host, *tensors(), HEADS, transformer_options=options)
            assert mine.counts.total == before + 2, "our override did not count each of the two calls exactly once"
    assert max(depths) == depths[-1] == depths[0] <= 16
    if not hidden and not reuse_object:
        assert foreign.number == 1 and mine.retakes == 0


def test_two_reinstallers_and_an_override_below_keep_everyone_in_the_chain():
    below = Visits()
    mine = auto(base=below)
    foreigns = [Reinstaller(True, False), Reinstaller(False, False)]
    options = {SLOT: mine}
    for _ in range(2000):
        for foreign in foreigns:
            foreign.prepare(options)
        mine.hold_slot(options)
    masked(options)
    assert below.number == 1 and len(host.calls) == 1


def test_the_later_of_two_accelerators_acts():
    earlier = AttentionOverride(AttentionRequest("auto"))
    between = Visits(earlier)
    later = AttentionOverride(AttentionRequest("off"), base=between)
    options = {SLOT: later, ACTING: later}
    q, k, v = tensors()
    assert torch.equal(later(host, q, k, v, HEADS, transformer_options=options), host(q, k, v, HEADS))
    assert between.number == 1
    assert (later.counts.total, earlier.counts.total) == (1, 0)
    earlier(host, q, k, v, HEADS, transformer_options={SLOT: earlier, ACTING: earlier})
    assert earlier.counts.total == 1


def test_calls_from_several_threads_do_not_disturb_each_other():
    mine = auto(base=Visits())
    inside, go = threading.Barrier(4), []

    def func(*args, **kwargs):
        inside.wait(timeout=20)  # all four are in the chain at once
        return args[0]

    def work():
        mine(func, *tensors(), HEADS, mask=torch.zeros(6, 10))
        go.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(go) == 4 and mine.base.number == 4


def test_the_chain_is_usable_after_an_exception():
    mine = auto(base=Visits())

    def func(*args, **kwargs):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        mine(func, *tensors(), HEADS, mask=torch.zeros(6, 10))
    masked({}, mine)
    assert mine.base.number == 2 and mine.counts.total == 2


def test_nothing_of_a_run_is_kept():
    """A foreign callable may hold a whole model."""
    mine = auto()
    usurper = Visits()
    gone = weakref.ref(usurper)
    mine.start_run()
    options = {SLOT: usurper}
    mine.hold_slot(options)
    q, k, v = tensors()
    held = weakref.ref(q)
    mine(host, q, k, v, HEADS, transformer_options=options)
    mine.end_run()
    del usurper, options, q, k, v
    gc.collect()
    assert gone() is None and held() is None
    assert mine.counts.total == 1
    mine.start_run()
    assert mine.counts.total == 0
