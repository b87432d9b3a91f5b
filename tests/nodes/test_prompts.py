"""The Prompt Timeline node: one encoding per distinct prompt, the timing beside it, what it shows, and what a plain KSampler makes of it."""

import dataclasses
import sys
import types

import pytest
import torch
from longlive.accel.presets import LONGLIVE_2
from longlive.accel.sampler import ChunkPlan
from longlive.accel.timeline import CUT_PREFIX, Timeline, schedule
from longlive.nodes.node_text import show_text
from longlive.nodes.prompts import LongLivePromptTimeline, prompt_entries
from longlive.nodes.sampling import sample_video
from longlive.nodes.sampling_job import SamplingRequest
from longlive.tests.nodes.tiny_wan import tiny_wan


class FakeClip:
    """Counts what it is asked; a prompt's encoding is made from its text."""

    def __init__(self, entries: int = 1):
        self.encoded: list[str] = []
        self.options: list[dict] = []
        self.entries = entries

    def tokenize(self, text, **options):
        self.options.append(options)
        length = max(512, len(text.split()))
        return {"umt5xxl": [[(ord(text[index % len(text)]), 1.0) for index in range(length)]]}

    def encode_from_tokens_scheduled(self, tokens):
        ids = torch.tensor([token for token, _ in tokens["umt5xxl"][0]])
        self.encoded.append("".join(chr(token) for token in ids.tolist()))
        rows = torch.sin(ids[:8, None] * torch.arange(1, 4097) * 0.01)
        return [[rows[None], {"pooled_output": None}] for _ in range(self.entries)]


def run(text, clip=None, model="LongLive 2.0", **inputs):
    output = LongLivePromptTimeline.execute(clip or FakeClip(), text, model, **inputs)
    return output.args[0], output.ui.as_dict()["text"][0]


def test_each_distinct_prompt_is_encoded_once():
    clip = FakeClip()
    conditioning, _ = run("A fox.\n0:05 cut A den.\n0:10 switch A fox.\n0:15 cut A den.", clip)
    assert len(clip.encoded) == len(conditioning) == 3
    timeline = conditioning[0][1]["longlive_timeline"]
    assert isinstance(timeline, Timeline)
    assert timeline.texts == ("A fox.", "A den.", CUT_PREFIX + "A den.")
    assert [options["longlive_id"] for _, options in conditioning] == [0, 1, 2]
    assert all(options["longlive_timeline"] is timeline for _, options in conditioning)
    for encoded, text in zip(clip.encoded, timeline.texts):
        assert encoded.startswith(text)


def test_every_scheduled_number_has_an_entry():
    conditioning, _ = run("A. || B.\n0:02 cut C. || B.\n0:05 switch A. || D.")
    timeline = conditioning[0][1]["longlive_timeline"]
    entries = {options["longlive_id"] for _, options in conditioning}
    for chunk in schedule(timeline, 8, 8, 24):
        assert len(chunk.prompts) == 2
        assert all(number in entries for number in chunk.prompts)


def test_parentheses_are_plain_text_unless_asked():
    clip = FakeClip()
    run("A fox (red).", clip)
    run("A fox (red:1.3).", clip, prompt_weights=True)
    assert clip.options == [{"disable_weights": True}, {}]


def test_core_tokenizer_understands_the_option():
    from comfy.sd1_clip import SDTokenizer

    class Letters(SDTokenizer):
        """Core's tokenizer with letters for tokens: needs no vocabulary file."""

        def __init__(self):
            self.tokenizer = lambda word: {"input_ids": [ord(letter) for letter in word]}
            self.min_length, self.min_padding, self.embedding_key = 8, None, "umt5xxl"
            self.disable_weights, self.embedding_identifier, self.embedding_directory = False, "embedding:", None
            self.tokenizer_adds_end_token, self.tokens_start = False, 0
            self.start_token, self.end_token, self.max_length, self.max_word_length = None, None, 10_000, 8
            self.pad_to_max_length, self.pad_token, self.pad_left = False, 0, False

    plain = Letters().tokenize_with_weights("a (b:1.5)", disable_weights=True)
    weighted = Letters().tokenize_with_weights("a (b:1.5)")
    assert [chr(token) for token, _ in plain[0] if token] == list("a (b:1.5)")
    assert {weight for _, weight in plain[0]} == {1.0}
    assert 1.5 in {weight for _, weight in weighted[0]}


def test_shows_the_snapped_times_of_the_chosen_model():
    text = "A fox.\n0:05 cut A den."
    assert "cut asked 0:05 -> 0:05.21 (chunk 4, frame 125): A den." in run(text)[1]
    shown = run(text.replace("cut", "switch"), model="LongLive 1.0")[1]
    # Chunks of 3 latents at 16 fps begin at 0, 9, 21, 33, 45, 57, 69, 81: 80 is nearest 81.
    assert "switch asked 0:05 -> 0:05.06 (chunk 7, frame 81): A den." in shown
    assert "chunks of 3 latent frames at 16 fps" in shown
    # Chunks of 1 latent begin at 0, 1, 5, ... 37, 41: 40 is nearest 41.
    assert "(chunk 11, frame 41)" in run(text, chunk_frames=1, fps=8)[1]


def test_says_what_is_doubtful():
    assert "LongLive 1.0 was not trained on cuts" in run("A.\n0:05 cut B.", model="LongLive 1.0")[1]
    assert "has 600 tokens; LongLive reads the first 512" in run("fox " * 600)[1]
    assert "starts at 0:00" in run("0:03 A.")[1]


def test_times_can_count_from_the_whole_video():
    assert run("A.")[0][0][1]["longlive_timeline"].origin == "part"
    assert run("A.", times_count_from="the whole video")[0][0][1]["longlive_timeline"].origin == "video"


@pytest.mark.parametrize("text, words", [("", "empty"), ("A || B\n0:05 C", "every time needs the same number"), ("A.\n0:05 [fade] B", r"\[fade\]")])
def test_bad_text_is_refused_in_words(text, words):
    with pytest.raises(ValueError, match=words):
        run(text)


def test_a_missing_or_scheduled_clip_is_refused():
    with pytest.raises(ValueError, match="no text encoder"):
        LongLivePromptTimeline.execute(None, "A.", "LongLive 2.0")
    with pytest.raises(ValueError, match="2 encodings of one prompt"):
        run("A.", FakeClip(entries=2))


def test_the_chunked_sampler_gives_each_chunk_its_prompt():
    conditioning, _ = run("A fox.\n0:00.2 switch A den.\n0:00.5 cut A lake.")
    recipe = dataclasses.replace(LONGLIVE_2, chunk_frames=2, window_frames=8, sink_frames=2, steps=2)
    model = tiny_wan(48)
    latent = {"samples": torch.zeros(1, 48, 8, 4, 4)}
    request = SamplingRequest(recipe)
    # The same conditions without any timing, their numbers spelled out: chunks of 2 latents begin at frames 0, 5, 13 and 21.
    plain = [[tensor, {}] for tensor, _ in conditioning]
    plans = [ChunkPlan(0), ChunkPlan(1, is_switch=True), ChunkPlan(3, is_cut=True), ChunkPlan(2)]
    expected = sample_video(model, plain, None, latent, request, plans=plans).latent["samples"]
    result = sample_video(model, conditioning, None, latent, request).latent["samples"]
    assert torch.equal(result, expected)
    # The prompts matter at all: with the first one throughout, chunk 0 stays and chunk 1 changes.
    single = sample_video(model, plain[:1], None, latent, request).latent["samples"]
    assert torch.equal(single[:, :, :2], result[:, :, :2])
    assert (single[:, :, 2:4] - result[:, :, 2:4]).abs().max() > 1e-4


def test_a_plain_ksampler_uses_the_first_prompt_alone():
    import comfy.sample

    conditioning, _ = run("A fox.\n0:05 cut A den.")
    model = tiny_wan(48)
    noise = torch.randn((1, 48, 2, 4, 4), generator=torch.Generator().manual_seed(1))

    def sample(positive):
        return comfy.sample.sample(model, noise, 2, 1.0, "euler", "simple", positive, positive, torch.zeros_like(noise), disable_pbar=True)

    first = sample(conditioning[:1])
    assert first.std() > 0
    assert torch.equal(sample(conditioning), first)
    # Without the mark both prompts would be mixed.
    mixed = sample(list(prompt_entries(conditioning).values()))
    assert (mixed - first).abs().max() > 1e-5


def test_prompt_entries_are_active_and_leave_the_original_alone():
    conditioning, _ = run("A fox.\n0:05 cut A den.")
    entries = prompt_entries([*conditioning, [torch.zeros(1), {"other": 1}]])
    assert sorted(entries) == [0, 1, 2]
    assert all("start_percent" not in options for _, options in entries.values())
    assert conditioning[1][1]["start_percent"] == 1.0


def test_text_goes_to_the_node_of_a_running_server(monkeypatch):
    sent = []
    instance = types.SimpleNamespace(send_progress_text=lambda text, node_id: sent.append((text, node_id)))
    monkeypatch.setitem(sys.modules, "server", types.SimpleNamespace(PromptServer=types.SimpleNamespace(instance=instance)))
    show_text(types.SimpleNamespace(hidden=types.SimpleNamespace(unique_id="7")), "hello")
    show_text(types.SimpleNamespace(hidden=None), "nobody listens")
    assert sent == [("hello", "7")]
