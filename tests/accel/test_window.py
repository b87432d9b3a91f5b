"""Window bookkeeping against the tables of the reference (read out of upstream's cache) and its own invariants."""

import random

import pytest
from longlive.accel.window import EMPTY, Window


def chunks_in(placement, length=8):
    """Chunk numbers in window order."""
    return [frame // length for frame in placement.frames[::length]]


def roll(window, count, cuts=(), length=8, recache=False):
    """Windows per chunk; with ``recache`` the clean pass's window too."""
    seen = []
    for chunk in range(count):
        placement = window.enter(chunk * length, length)
        row = [chunks_in(placement, length)]
        if chunk in cuts:
            if recache:
                window.forget_history(chunk * length)
            row.append(chunks_in(window.enter(chunk * length, length), length))
            window.pin(length)
        seen.append(row)
    return seen


def test_single_shot_keeps_the_sink_and_the_two_newest_chunks():
    rows = [row[0] for row in roll(Window(32, 8), 7)]
    assert rows == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 2, 3, 4], [0, 3, 4, 5], [0, 4, 5, 6]]


@pytest.mark.parametrize(
    ("cuts", "expected"),
    [
        ((1,), {3: [0, 1, 2, 3], 4: [0, 1, 3, 4], 5: [0, 1, 4, 5], 6: [0, 1, 5, 6]}),
        ((2,), {3: [0, 1, 2, 3], 4: [0, 2, 3, 4], 5: [0, 2, 4, 5], 6: [0, 2, 5, 6], 12: [0, 2, 11, 12]}),
        ((3,), {4: [0, 2, 3, 4], 5: [0, 3, 4, 5], 6: [0, 3, 5, 6], 7: [0, 3, 6, 7]}),
        ((4, 9), {4: [0, 2, 3, 4], 6: [0, 4, 5, 6], 8: [0, 4, 7, 8], 9: [0, 4, 8, 9], 10: [0, 8, 9, 10], 11: [0, 9, 10, 11], 12: [0, 9, 11, 12]}),
        ((6,), {7: [0, 5, 6, 7], 8: [0, 6, 7, 8], 9: [0, 6, 8, 9], 10: [0, 6, 9, 10]}),
        ((4, 5, 6), {5: [0, 3, 4, 5], 6: [0, 4, 5, 6], 7: [0, 5, 6, 7], 8: [0, 6, 7, 8], 9: [0, 6, 8, 9]}),
    ],
)
def test_cuts_pin_the_shot(cuts, expected):
    rows = roll(Window(32, 8, shot_pin=True), 13, cuts)
    assert {chunk: rows[chunk][0] for chunk in expected} == expected


def test_one_cut_stays_pinned_for_a_hundred_chunks():
    rows = roll(Window(32, 8, shot_pin=True), 103, cuts=(2,))
    assert all(row[0] == [0, 2, chunk - 1, chunk] for chunk, row in enumerate(rows) if chunk > 4)


def test_clean_recache_forgets_all_but_the_sink():
    rows = roll(Window(32, 8, shot_pin=True), 8, cuts=(2, 5), recache=True)
    assert rows[2] == [[0, 1, 2], [0, 2]]
    assert rows[3:5] == [[[0, 2, 3]], [[0, 2, 3, 4]]]
    assert rows[5] == [[0, 2, 4, 5], [0, 5]]
    assert rows[6:] == [[[0, 5, 6]], [[0, 5, 6, 7]]]


def test_recache_before_the_sink_is_full_keeps_the_noisy_frames_as_sink():
    # Seen in upstream's cache at chunk 4, window 20, sink 8, cut at chunk 1: frames 4-7 stand in the sink (noisy) and again behind it (clean).
    window = Window(20, 8, shot_pin=True)
    window.enter(0, 4)
    window.enter(4, 4)
    window.forget_history(4)
    assert window.enter(4, 4).frames == (0, 1, 2, 3, 4, 5, 6, 7, 4, 5, 6, 7)


def test_recache_counts_slots_never_written_as_sink():
    window = Window(24, 12, shot_pin=True)
    window.enter(0, 4)
    window.enter(4, 4)
    window.forget_history(4)
    assert window.enter(4, 4).frames == (0, 1, 2, 3, 4, 5, 6, 7, EMPTY, EMPTY, EMPTY, EMPTY, 4, 5, 6, 7)


def test_a_ragged_roll_carries_the_pin_past_the_sink():
    # Upstream, chunk 4, window 18, sink 4, cut at 2: the pin goes 8 -> 6 -> 2 and is lost; only exact contact with the sink protects it.
    window = Window(18, 4, shot_pin=True)
    starts = []
    for chunk in range(8):
        window.enter(chunk * 4, 4)
        if chunk == 2:
            window.pin(4)
        starts.append(window.pin_start)
    assert starts[2:] == [8, 8, 6, 2, 2, 2]


def test_protected_prefix_larger_than_what_is_left_is_overwritten_at_its_end():
    window = Window(16, 8, shot_pin=True)
    window.enter(0, 8)
    window.enter(8, 8)
    window.pin(8)  # sink and pin fill the window
    assert chunks_in(window.enter(16, 8)) == [0, 2]


def test_first_generation_never_rewrites_its_sink():
    window = Window(12, 6, keeps_sink=True)
    assert window.enter(0, 3).first_written == 0
    assert window.enter(0, 3).first_written == 0  # chunk 0 itself may
    assert window.enter(3, 3).first_written == 0  # inserted once
    assert window.enter(3, 3).first_written == 3  # then left alone: frames 3-5 lie in the sink
    for chunk in range(2, 6):
        window.enter(3 * chunk, 3)
    assert window.enter(6, 12).first_written == 6  # a re-cache of the whole window
    assert window.enter(6, 12, rewrite_sink=True).first_written == 0


def test_slots_in_use_are_always_a_prefix_and_never_doubled():
    dice = random.Random(5)
    for _ in range(300):
        capacity = dice.randint(2, 40)
        window = Window(capacity, dice.randint(0, capacity - 1), shot_pin=dice.random() < 0.5)
        length = dice.randint(1, capacity)
        for chunk in range(12):
            first = window.enter(chunk * length, length)
            again = window.enter(chunk * length, length)
            for placement in (first, again):
                assert sorted(placement.order) == list(range(placement.filled))
                assert placement.filled <= capacity
                assert placement.frames[-length:] == tuple(range(chunk * length, (chunk + 1) * length))
                written = [slot + i for _, slot, n in placement.runs() for i in range(n)]
                assert sorted(written) == sorted(placement.slots)
            if dice.random() < 0.3 and window.sink:
                window.pin(length)


def test_a_chunk_larger_than_the_window_is_refused():
    with pytest.raises(ValueError, match="chunk of 9 latent frames does not fit a window of 8"):
        Window(8, 2).enter(0, 9)


def test_sink_as_large_as_the_window_is_refused():
    with pytest.raises(ValueError, match="sink .8 latent frames. must be smaller than the window"):
        Window(8, 8)
