"""Timeline text, snapping and the prompt of every chunk, against counting by hand and a slow search."""

from random import Random

import pytest
from longlive.accel.timeline import CUT_PREFIX, ChunkPrompt, clean, format_time, parse, schedule, snap, snapped_text


def texts_of(timeline, chunks):
    """The prompts of the chunks as text, one string per chunk for a batch of one."""
    return [timeline.texts[chunk.prompts[0]] for chunk in chunks]


def kinds(timeline):
    return [(event.start_seconds, event.kind) for event in timeline.events]


def test_plain_text_is_one_prompt_from_the_start():
    timeline = parse("A long caption.\n\nIts second paragraph,\n  with   odd spaces.")
    assert kinds(timeline) == [(0.0, "start")]
    assert timeline.texts == ("A long caption. Its second paragraph, with odd spaces.",)
    assert timeline.notes == ()
    assert schedule(timeline, 3, 8, 24) == (ChunkPrompt((0,), False, False),) * 3


def test_lines_kinds_comments_and_continuation():
    timeline = parse(
        """
        # the story
        0:00 A fox walks.
        It looks around.
        # a comment between paragraphs

        Snow falls.
        0:05 cut The fox sleeps.
        00:10.5 switch The fox wakes up.
        1:00:02 The end.
        """
    )
    assert kinds(timeline) == [(0.0, "start"), (5.0, "cut"), (10.5, "switch"), (3602.0, "cut")]
    assert timeline.texts[0] == "A fox walks. It looks around. Snow falls."
    assert timeline.texts[timeline.events[2].prompts[0]] == "The fox wakes up."
    assert timeline.events[2].prompts == timeline.events[2].first_prompts
    for cut in (timeline.events[1], timeline.events[3]):
        bare, first = timeline.texts[cut.prompts[0]], timeline.texts[cut.first_prompts[0]]
        assert first == "The scene transitions. " + bare


def test_text_before_the_first_time_starts_at_zero():
    timeline = parse("A fox.\n0:04 cut A den.")
    assert kinds(timeline) == [(0.0, "start"), (4.0, "cut")]


def test_a_first_time_after_zero_moves_to_zero_and_is_said():
    timeline = parse("0:03 A fox.\n0:08 cut A den.")
    assert kinds(timeline) == [(0.0, "start"), (8.0, "cut")]
    assert "0:03" in timeline.notes[0] and "0:00" in timeline.notes[0]


@pytest.mark.parametrize(
    "line, seconds, kind, prompt",
    [
        ("00:05 cut A den.", 5.0, "cut", "A den."),
        ("[00:05] cut: A den.", 5.0, "cut", "A den."),
        ("- 0:05 CUT A den.", 5.0, "cut", "A den."),
        ("0:05: A den.", 5.0, "cut", "A den."),
        ("0:05 - [switch] A den.", 5.0, "switch", "A den."),
        ("0:05,25 switch - A den.", 5.25, "switch", "A den."),
        ("90:00 Cut: A den.", 5400.0, "cut", "A den."),
        ("0:05 cutlery on a table", 5.0, "cut", "cutlery on a table"),
        ("0:05 cut-glass vases", 5.0, "cut", "cut-glass vases"),
        ("0:05 [Wide shot] A den.", 5.0, "cut", "[Wide shot] A den."),
        ("0:05 Camera: pans left", 5.0, "cut", "Camera: pans left"),
        ("0:05 switch 3 dogs run", 5.0, "switch", "3 dogs run"),
    ],
)
def test_forms_of_a_timed_line(line, seconds, kind, prompt):
    event = parse("0:00 A fox.\n" + line)
    assert kinds(event)[1:] == [(seconds, kind)]
    assert event.texts[event.events[1].prompts[0]] == prompt


@pytest.mark.parametrize("line", ["16:9 widescreen", "3 dogs run", "2:30 pm, a street", "1:1000 scale", "12.30 o'clock", "0:05x", "10:30pm", "1920s Paris"])
def test_prose_that_begins_with_digits_is_no_time(line):
    timeline = parse("0:00 A fox.\n" + line)
    assert timeline.texts == ("A fox. " + line,)


def test_what_looks_almost_like_a_time_is_said():
    assert "line 2 begins with '5s'" in parse("A fox.\n5s A den.").notes[0]
    assert "'0:5'" in parse("A fox.\n0:5 A den.").notes[0]
    cut = parse("A fox.\n0:05 Cut flowers in a vase.")
    assert "'Cut' is read as the first word" in cut.notes[0]
    assert "Cut flowers in a vase." in cut.texts


def test_a_caption_that_carries_the_prefix_gets_it_once_and_on_the_first_chunk_only():
    timeline = parse("A fox.\n0:05 The scene transitions. A den.")
    assert timeline.texts == ("A fox.", "A den.", CUT_PREFIX + "A den.")


def test_equal_prompts_share_a_number():
    timeline = parse("A fox.\n0:05 switch A den.\n0:10 switch  A   fox.")
    assert timeline.texts == ("A fox.", "A den.")
    assert timeline.events[2].prompts == (0,)


def test_batch_prompts_side_by_side():
    timeline = parse("A fox. || A cat.\n0:05 cut A den. || A cat.")
    assert timeline.rows == 2
    assert [timeline.texts[number] for number in timeline.events[1].first_prompts] == [CUT_PREFIX + "A den.", CUT_PREFIX + "A cat."]
    assert timeline.events[0].prompts[1] == timeline.events[1].prompts[1]


def test_one_prompt_serves_every_row_of_a_known_batch():
    assert parse("A fox.\n0:05 A den.", batch=3).events[1].prompts == (1, 1, 1)
    assert parse("A || B || C", batch=3).rows == 3


@pytest.mark.parametrize(
    "text, batch, words",
    [
        ("", None, ("empty", "0:05 cut")),
        ("# only a comment\n\n", None, ("empty",)),
        ("0:00", None, ("line 1", "the prompt at 0:00 is empty")),
        ("A fox.\n0:05 cut", None, ("line 2", "empty")),
        ("A fox. || ", None, ("prompt 2 of 2", "empty")),
        ("A fox. || A cat.\n0:05 A den.", None, ("line 2 has 1 prompt", "line 1 has 2 prompts", "||")),
        ("A || B", 3, ("2 prompts", "3 rows", "1 prompt for all rows or 3")),
        ("A.\n0:05 B.\n0:05 C.", None, ("line 3", "0:05", "line 2", "increase")),
        ("A.\n0:05 B.\n0:04.9 C.", None, ("line 3", "0:04.9", "increase")),
        ("0:00 A.\n0:00 B.", None, ("increase",)),
        ("A.\n0:05 [fade] B.", None, ("line 2", "[fade]", "[cut] or [switch]")),
        ("A.\n0:05 dissolve B.", None, ("'dissolve'", "cut and switch", "'Dissolve'")),
        ("-0:05 A.", None, ("-0:05", "before the video")),
        ("A.\n0:75 B.", None, ("0:75", "1:15")),
        ("A.\n1:75:00 B.", None, ("1:75:00",)),
        ("A.\n0:05-0:10 B.", None, ("range", "start")),
        ("A.\n[0:05 - 0:10] B.", None, ("range",)),
    ],
)
def test_bad_text_is_refused_in_words(text, batch, words):
    with pytest.raises(ValueError) as refused:
        parse(text, batch)
    for word in words:
        assert word in str(refused.value)


def test_an_unknown_origin_is_refused():
    with pytest.raises(ValueError, match="'part' or 'video'"):
        parse("A.", origin="end")


def test_events_snap_to_the_nearest_chunk():
    timeline = parse("A.\n0:05 cut B.\n0:10 switch C.")
    # Chunks of 8 latents at 24 fps begin at frames 0, 29, 61, 93, 125, 157, 189, 221, 253; 120 is nearest 125, 240 is nearest 253 or 221: 13 against 19.
    snapped = snap(timeline, 8, 24, num_chunks=10)
    assert [(item.chunk, item.frame) for item in snapped.events] == [(0, 0), (4, 125), (8, 253)]
    assert snapped.notes == ()
    chunks = schedule(timeline, 10, 8, 24)
    assert texts_of(timeline, chunks) == ["A."] * 4 + [CUT_PREFIX + "B."] + ["B."] * 3 + ["C."] * 2
    assert [chunk.is_cut for chunk in chunks] == [index == 4 for index in range(10)]
    assert [chunk.is_switch for chunk in chunks] == [index == 8 for index in range(10)]


def test_nearest_against_a_slow_search():
    for chunk_frames, fps in ((8, 24), (3, 16), (1, 24), (5, 23.976)):
        starts = [0] + [4 * chunk_frames * chunk - 3 for chunk in range(1, 400)]
        for tenths in range(20, 300, 7):
            asked = tenths / 10 * fps
            nearest = min(range(len(starts)), key=lambda chunk: (abs(starts[chunk] - asked), chunk))
            timeline = parse(f"A.\n{format_time(tenths / 10)} B.")
            assert snap(timeline, chunk_frames, fps).events[1].chunk == max(1, nearest)


def test_two_events_on_one_chunk_move_the_later_and_say_so():
    timeline = parse("A.\n0:05 cut B.\n0:05.2 switch C.\n0:05.4 cut D.")
    snapped = snap(timeline, 8, 24, num_chunks=8)
    assert [item.chunk for item in snapped.events] == [0, 4, 5, 6]
    assert "0:05.2" in snapped.notes[0] and "chunk 5" in snapped.notes[0]
    assert len(snapped.notes) == 2


def test_an_event_near_the_start_takes_chunk_one_and_says_so():
    snapped = snap(parse("A.\n0:00.1 cut B."), 8, 24)
    assert [item.chunk for item in snapped.events] == [0, 1]
    assert "moves on to chunk 1" in snapped.notes[0]


def test_events_past_the_end_are_left_out_and_said():
    timeline = parse("A.\n0:05 cut B.\n0:30 cut C.")
    snapped = snap(timeline, 8, 24, num_chunks=6)
    assert len(snapped.events) == 2
    # 48 latents are 189 frames.
    assert "0:30" in snapped.notes[0] and "ends at 0:07.88" in snapped.notes[0]
    assert texts_of(timeline, schedule(timeline, 6, 8, 24))[-1] == "B."


def test_the_second_half_of_the_last_chunk_takes_the_last_chunk_or_says_why_not():
    # Two chunks: frames 0-28 and 29-60. Frame 58 is nearer to the end (61) than to 29.
    timeline = parse("A.\n0:02.4 cut B.")
    assert [item.chunk for item in snap(timeline, 8, 24, num_chunks=2).events] == [0, 1]
    crowded = snap(parse("A.\n0:01 cut B.\n0:02.4 cut C."), 8, 24, num_chunks=2)
    assert [item.chunk for item in crowded.events] == [0, 1]
    assert "already takes the last chunk" in crowded.notes[0]


def test_every_chunk_has_a_prompt_and_no_chunk_two():
    for chunk_frames, fps in ((8, 24), (3, 16)):
        for step in (0.3, 0.9, 2.1, 7.0):
            text = "\n".join(f"{format_time(index * step)} switch P{index}" for index in range(12))
            timeline = parse(text)
            for num_chunks in (1, 2, 7, 40):
                chunks = schedule(timeline, num_chunks, chunk_frames, fps)
                used = [item.chunk for item in snap(timeline, chunk_frames, fps, num_chunks=num_chunks).events]
                assert len(chunks) == num_chunks
                assert used == sorted(set(used)) and used[0] == 0 and used[-1] < num_chunks
                assert sum(chunk.is_switch for chunk in chunks) == len(used) - 1


def test_a_cut_at_zero_does_nothing_in_a_new_video():
    timeline = parse("0:00 cut A.\n0:05 B.")
    assert schedule(timeline, 6, 8, 24)[0] == ChunkPrompt(timeline.events[0].prompts, False, False)
    assert "no effect" in snap(timeline, 8, 24).notes[0]


def test_a_continued_video_counts_from_the_new_part():
    timeline = parse("0:00 cut A.\n0:05 switch B.")
    chunks = schedule(timeline, 6, 8, 24, first_chunk=10)
    # A part that does not begin the video has 32 frames in every chunk: 120 is nearest to 128, the fourth chunk of the part.
    assert texts_of(timeline, chunks) == [CUT_PREFIX + "A."] + ["A."] * 3 + ["B."] * 2
    assert [chunk.is_cut for chunk in chunks] == [True] + [False] * 5
    assert [chunk.is_switch for chunk in chunks] == [False] * 4 + [True, False]
    assert [item.chunk for item in snap(timeline, 8, 24, first_chunk=10).events] == [10, 14]
    quiet = parse("A.")
    assert schedule(quiet, 1, 8, 24, first_chunk=10) == (ChunkPrompt((0,), False, False),)


def test_a_continued_video_counts_from_the_whole_video():
    timeline = parse("A.\n0:05 cut B.\n0:10 switch C.", origin="video")
    whole = schedule(timeline, 12, 8, 24)
    for first_chunk in range(1, 12):
        assert schedule(timeline, 12 - first_chunk, 8, 24, first_chunk=first_chunk) == whole[first_chunk:]


def test_snapped_text_reads_as_a_table():
    timeline = parse("A fox.\n0:05 cut A den.\n0:30 cut A lake.")
    lines = snapped_text(timeline, 8, 24, num_chunks=6).splitlines()
    assert lines[0] == "start asked 0:00 -> 0:00 (chunk 0, frame 0): A fox."
    assert lines[1] == "cut asked 0:05 -> 0:05.21 (chunk 4, frame 125): A den."
    assert lines[2].startswith("note: the cut at 0:30 is left out")
    assert len(lines) == 3
    assert len(snapped_text(timeline, 8, 24).splitlines()) == 3


@pytest.mark.parametrize("values", [{"chunk_frames": 0}, {"fps": 0}, {"num_chunks": 0}, {"first_chunk": -1}])
def test_impossible_grids_are_refused(values):
    with pytest.raises(ValueError, match="at least 1"):
        snap(parse("A."), **({"chunk_frames": 8, "fps": 24} | values))


def test_clean_follows_upstream():
    assert clean("  Tom &amp;amp; Jerry\n\n\u201chello\u201d  it\u2019s e\u0301 ") == "Tom & Jerry \"hello\" it's \u00e9"


@pytest.mark.parametrize("seconds, written", [(0, "0:00"), (5.25, "0:05.25"), (65.5, "1:05.5"), (59.999, "1:00"), (3602, "1:00:02"), (125 / 24, "0:05.21")])
def test_format_time(seconds, written):
    assert format_time(seconds) == written


def test_any_text_is_either_read_or_refused_in_words():
    times = ["0:00", "0:05", "1:02:03.5", "0:5", "-0:01", "[0:09]"]
    pieces = [*times, "[", "]", "cut", "Cut", "switch:", "[fade]", "||", "#", "\n", "\n", "A fox", "16:9", "- ", ":", " "]
    random = Random(0)
    read = 0
    for _ in range(4000):
        text = " ".join(random.choice(pieces) for _ in range(random.randrange(1, 14)))
        try:
            timeline = parse(text)
        except ValueError as error:
            assert len(str(error).split()) > 4
            continue
        read += 1
        times = [event.start_seconds for event in timeline.events]
        assert times == sorted(set(times)) and times[0] == 0
        assert all(timeline.texts) and len(set(timeline.texts)) == len(timeline.texts)
        used = {number for event in timeline.events for number in (*event.prompts, *event.first_prompts)}
        assert used == set(range(len(timeline.texts)))
        assert {len(event.prompts) for event in timeline.events} == {timeline.rows}
        assert len(schedule(timeline, 5, 3, 16)) == 5
    assert read > 500
