"""accel.report: data, JSON and text of what was asked and what happened."""

import json

from longlive.accel.report import Call, CallCounts, Line, Report

SELF = Call("self", True, "1x2x12x24x64 float32", True)
FIRST = Call("self", True, "1x2x12x12x64 float32", False)
CROSS = Call("cross", True, "1x2x12x7x64 float32", False)
PLAIN = Call("self", False, "1x2x12x12x64 float32", False)


def counted() -> CallCounts:
    counts = CallCounts()
    for call in (SELF, SELF, FIRST, CROSS):
        counts.add(call, "torch")
    counts.add(PLAIN, "ComfyUI", "the call carries a mask")
    return counts


def test_counts_add_up():
    found = counted().to_dict()
    assert found == {
        "calls": 5,
        "accelerated": 4,
        "self": 4,
        "cross": 1,
        "cached": 2,
        "plain": 1,
        "implementations": {"torch": 4, "ComfyUI": 1},
        "passed_on": {"the call carries a mask": 1},
        "shapes": {"1x2x12x24x64 float32": 2, "1x2x12x12x64 float32": 2, "1x2x12x7x64 float32": 1},
    }
    assert found["calls"] == found["self"] + found["cross"] == sum(found["shapes"].values())


def test_clear_starts_again():
    counts = counted()
    counts.clear()
    assert counts.total == 0 and counts.implementations() == {}


def test_report_as_json_and_text():
    report = Report("Attention Accelerator", (Line("attention", "auto", "torch", "a CPU"),), counted().to_dict(), ("a note",))
    assert json.loads(json.dumps(report.to_dict())) == report.to_dict()
    assert report.text().splitlines()[:3] == ["attention: auto → torch (a CPU)", "calls: 5", "accelerated: 4"]
    assert "implementations: torch 4, ComfyUI 1" in report.text()
    assert report.text().endswith("a note")
    assert "passed_on: none" in Report("x", counts=CallCounts().to_dict()).text()
