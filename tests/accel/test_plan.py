"""accel.plan: a request and a problem become one implementation, with reasons."""

import dataclasses

import pytest
import torch
from longlive.accel.plan import HOST, AttentionRequest, make_plan
from longlive.kernels import dispatch
from longlive.kernels.dispatch import NoImplementation, Problem, names

WINDOW = Problem(q_len=7040, k_len=28160, heads=24, head_dim=128, dtype=torch.bfloat16, device="cuda")
TINY = Problem(q_len=12, k_len=24, heads=2, head_dim=64, dtype=torch.float32, device="cpu")


@pytest.fixture
def only_flash_attn_4_missing(monkeypatch):
    monkeypatch.setattr(dispatch, "is_installed", lambda module: module != "flash_attn.cute")
    monkeypatch.setattr(dispatch, "_probed", lambda target: None)


def test_auto_says_what_runs_and_why_nothing_faster_does(only_flash_attn_4_missing):
    plan = make_plan(AttentionRequest(), WINDOW, 90)
    assert (plan.requested, plan.effective) == ("auto", "cudnn")
    assert plan.why == (
        "the fastest that auto takes for bfloat16 and head_dim 128 on sm_90; not flash-attn-4: module flash_attn.cute is not installed"
    )
    assert plan.explain()[:2] == ("flash-attn-4: module flash_attn.cute is not installed", "cudnn: chosen")
    assert len(plan.explain()) == len(names("attention"))


def test_auto_on_a_cpu_computes():
    plan = make_plan(AttentionRequest(), TINY, "cpu")
    assert plan.effective == "torch"
    q = torch.randn(1, 12, 2, 64)
    k = torch.randn(1, 24, 2, 64)
    torch.testing.assert_close(
        plan.function(q, k, k, problem=TINY),
        torch.nn.functional.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, k))).transpose(1, 2),
    )


def test_off_goes_to_the_host_and_still_explains():
    plan = make_plan(AttentionRequest("off"), TINY, "cpu")
    assert (plan.effective, plan.why, plan.function) == (HOST, "attention is off", None)
    assert plan.rows["reference"] is None
    assert str(plan.line) == f"attention: off → {HOST} (attention is off)"


def test_a_name_runs_or_raises():
    assert make_plan(AttentionRequest("reference"), TINY, "cpu").effective == "reference"
    with pytest.raises(NoImplementation, match="this device is cpu"):
        make_plan(AttentionRequest("cudnn"), TINY, "cpu")


def test_auto_gives_what_nothing_can_compute_to_the_host_with_every_reason():
    plan = make_plan(AttentionRequest(), dataclasses.replace(TINY, sparsity="losa"), "cpu")
    assert (plan.effective, plan.function) == (HOST, None)
    assert all(name in plan.why for name in names("attention"))


def test_a_failed_row_is_skipped_and_named(only_flash_attn_4_missing):
    plan = make_plan(AttentionRequest(), WINDOW, 90, without={"cudnn": "did not run: no plan found"})
    assert plan.effective == "torch"
    assert "not cudnn: did not run: no plan found" in plan.why


def test_unknown_requests_are_refused_with_what_there_is():
    with pytest.raises(ValueError, match='one of off, auto, flash-attn-4, .*; got "sage"'):
        AttentionRequest("sage")
