"""What a run of the Chunked Sampler computes: start images, lengths, prompts, guidance, extension, memory, and what it leaves alone."""

import gc
import random
import traceback
import types
import weakref

import comfy.model_management
import comfy.model_patcher
import comfy.sample
import comfy.samplers
import comfy.sd
import latent_preview
import numpy
import pytest
import torch
from comfy.patcher_extension import CallbacksMP
from longlive.accel import kv_cache
from longlive.accel.geometry import latent_frames_for, pixel_frames_of
from longlive.accel.kv_cache import KVCache
from longlive.accel.presets import LONGLIVE_1
from longlive.nodes import sampling
from longlive.nodes.decode import make_plan
from longlive.tests.nodes.chunked import difference, execute, latent, lora, prompt, sample, start_image, text, timeline
from longlive.tests.nodes.tiny_wan import lively_wan, tiny_wan, tiny_weights

LAYERS = 2


@pytest.fixture(scope="module")
def wan():
    return lively_wan(48, layers=LAYERS)


@pytest.fixture(scope="module")
def wan1():
    return lively_wan(16, layers=LAYERS)


@pytest.fixture(scope="module")
def plain(wan):
    """Four chunks of 2 under one prompt."""
    return sample(wan)


@pytest.fixture
def caches(monkeypatch):
    """Weak references to every KV cache that is made."""
    made = []
    init = KVCache.__init__

    def remember(self, *args):
        init(self, *args)
        made.append(weakref.ref(self))

    monkeypatch.setattr(KVCache, "__init__", remember)
    return made


@pytest.fixture
def calls(monkeypatch):
    """(kind, layer, commit, query tokens, key tokens, window, frame_tokens, chunk, sink) of every attention call."""
    seen = []

    def override(func, q, k, v, heads, *args, transformer_options=None, **kwargs):
        tag = transformer_options.get("longlive")
        seen.append({"q": q.shape, "k": k.shape, "v": v.shape, "tag": dict(tag) if tag else None, "grad": q.requires_grad})
        return func(q, k, v, heads, *args, transformer_options=transformer_options, **kwargs)

    seen_by = lambda model: model.model_options.setdefault("transformer_options", {}).update(optimized_attention_override=override)  # noqa: E731
    return seen, seen_by


# Length


@pytest.mark.parametrize("asked", [1, 2, 3, 7, 8])
def test_a_length_off_the_chunk_grid_is_padded(wan, plain, asked):
    got, _, shown = execute(wan, into=latent(asked))
    whole = -(-asked // 2) * 2
    assert got["samples"].shape[2] == whole
    assert torch.equal(got["samples"], plain[:, :, :whole]), "padding changes nothing in what was asked"
    assert got["longlive"]["asked_frames"] == asked
    assert (f"asked for {asked} latent frames; chunks have 2, so {whole} are made" in shown) == (whole != asked)


def test_no_frames_at_all_are_refused(wan):
    with pytest.raises(ValueError, match="0 latent frames"):
        sample(wan, into=latent(0))


def asked_length(latent):
    """Pixel frames that VAE Stream Decode makes of a LATENT."""
    vae = types.SimpleNamespace(latent_channels=48, upscale_ratio=(pixel_frames_of, 16, 16), first_stage_model=None)
    return make_plan(latent["samples"], latent["longlive"], vae, 0, 0).end_frame


@pytest.mark.parametrize("first", [13, 16])
@pytest.mark.parametrize("second", [1, 4, 5, 16])
@pytest.mark.parametrize("through", ["state", "extend"])
def test_a_continued_video_has_the_pixel_frames_asked_for(wan, first, second, through):
    """The old part, in whole chunks, and then exactly the frames asked for: the new part's first latent is not the video's first."""
    old, state, _ = execute(wan, into=latent(latent_frames_for(first), asked_frames=latent_frames_for(first), asked_pixel_frames=first, fps=24))
    assert asked_length(old) == first
    kept = old["samples"].shape[2]
    new = latent(latent_frames_for(second), asked_frames=latent_frames_for(second), asked_pixel_frames=second, fps=24)
    got, _, _ = execute(wan, into=new, **({"state": state} if through == "state" else {"extend": old}))
    assert asked_length(got) == pixel_frames_of(kept) + second
    assert got["longlive"]["asked_frames"] <= got["samples"].shape[2]
    assert got["samples"].shape[2] - got["longlive"]["asked_frames"] < 2, "a chunk that would be trimmed as a whole is not sampled"


def test_a_latent_from_core_counts_in_latent_frames(wan):
    _, state, _ = execute(wan, into=latent(3))
    got, _, _ = execute(wan, into=latent(3), state=state)
    assert got["longlive"]["asked_frames"] == 4 + 3 and got["longlive"]["asked_pixel_frames"] is None


def test_a_note_that_core_nodes_carried_along_is_not_believed(wan):
    """LatentCut and the like copy the dict and change the samples only."""
    stale = latent(4, asked_frames=9, asked_pixel_frames=33, fps=24)
    got, _, _ = execute(wan, into=stale)
    assert asked_length(got) == pixel_frames_of(4)


def test_what_the_latent_says_besides_travels_on(wan):
    given = latent(3, asked_frames=3, asked_pixel_frames=9, fps=30) | {"batch_index": [0], "other": "kept"}
    before = given["samples"].clone()
    got, _, _ = execute(wan, into=given)
    assert got["other"] == "kept" and "batch_index" not in got
    assert got["longlive"]["fps"] == 30 and got["longlive"]["chunk_frames"] == 2 and got["longlive"]["recipe"] == "longlive-2.0"
    assert torch.equal(given["samples"], before) and given["longlive"].keys() == {"asked_frames", "asked_pixel_frames", "fps"}


def test_changes_of_prompt_follow_the_frame_rate_of_the_latent(wan):
    """At 12 fps the fourth chunk starts at 21/12 s; at the release's 24 fps this time would be past the end."""
    lines = "0:00 a\n0:01.75 cut b"
    slow, _, _ = execute(wan, timeline(lines), latent(8, asked_frames=8, asked_pixel_frames=29, fps=12))
    assert slow["longlive"]["report"]["cuts"] == [3]
    quick, _, shown = execute(wan, timeline(lines), latent(8, asked_frames=8, asked_pixel_frames=29, fps=24))
    assert quick["longlive"]["report"]["cuts"] == [] and "left out" in shown


# Start image


def test_the_start_image_stays_as_it_is(wan):
    given = start_image(8)
    got = sample(wan, into=given)
    assert torch.equal(got[:, :, :1], given["samples"][:, :, :1])
    free = sample(wan)
    assert difference(got[:, :, 1:2], free[:, :, 1:2]) > 1e-2, "the frames after it see it"
    assert difference(got[:, :, 6:], free[:, :, 6:]) > 1e-3, "also in later chunks"


def test_the_start_image_is_told_timestep_zero(wan, monkeypatch):
    seen = []
    forward = sampling.chunk_forward

    def spy(dit, x, context, call, **kwargs):
        seen.append((call.commit, call.timesteps, x[:, :, 0].clone()))
        return forward(dit, x, context, call, **kwargs)

    monkeypatch.setattr(sampling, "chunk_forward", spy)
    given = start_image(4)
    sample(wan, into=given)
    image = wan.model.process_latent_in(given["samples"])[:, :, 0]
    assert [(commit, times) for commit, times, _ in seen] == [
        (False, (0.0, 999.0)),
        (False, (0.0, 833.0)),
        (True, (0.0, 0.0)),
        (False, (999.0, 999.0)),
        (False, (833.0, 833.0)),
        (True, (0.0, 0.0)),
    ]
    assert all(torch.equal(frame, image) for _, _, frame in seen[:3])


@pytest.mark.parametrize("given", [2, 3, 5])
def test_several_start_frames_stay_as_they_are(wan, given):
    """A start image of N > 1 pictures is a start video: whole latent frames, also past the first chunk."""
    first = start_image(8, given)
    got = sample(wan, into=first)
    assert torch.equal(got[:, :, :given], first["samples"][:, :, :given])
    assert difference(got[:, :, given:], sample(wan)[:, :, given:]) > 1e-3


class PictureVAE:
    """Stands where core's Wan 2.2 VAE does: one latent frame for the first picture and one for every four more, here their means."""

    def encode(self, pictures):
        groups = [pictures[:1], *(part for part in pictures[1:].split(4) if len(part) == 4)]
        small = [torch.nn.functional.adaptive_avg_pool2d(part.movedim(-1, 1), (4, 4)).mean((0, 1)) for part in groups]
        return torch.stack(small).expand(1, 48, -1, -1, -1) + torch.arange(48).reshape(1, 48, 1, 1, 1) / 48


@pytest.mark.parametrize(("pictures", "given"), [(1, 1), (4, 1), (5, 2), (40, 8)])
@pytest.mark.parametrize("size", [(64, 64), (100, 48)], ids=["fitting", "another size"])
def test_pictures_through_cores_start_image_node(wan, pictures, given, size):
    """Core fits the picture to the video; of N pictures those that fit the length are kept, in whole latent frames."""
    from comfy_extras.nodes_wan import Wan22ImageToVideoLatent

    image = torch.rand(pictures, *size, 3, generator=torch.Generator().manual_seed(4))
    into = Wan22ImageToVideoLatent.execute(PictureVAE(), width=64, height=64, length=29, batch_size=1, start_image=image).args[0]
    assert int((into["noise_mask"].amax((0, 1, 3, 4)) == 0).sum()) == given
    got = sample(wan, into=into)
    assert got.shape[2] == 8 and torch.equal(got[:, :, :given], into["samples"][:, :, :given])
    assert given == 8 or difference(got[:, :, given:], sample(wan)[:, :, given:]) > 1e-3


def test_a_start_image_of_the_other_release_is_refused(wan1):
    with pytest.raises(ValueError, match="the latent has 48 channels .* and the model needs 16 channels"):
        sample(wan1, into=start_image(4))


def test_a_start_image_with_a_length_off_the_grid(wan):
    given = start_image(7)
    got, _, _ = execute(wan, into=given)
    assert got["samples"].shape[2] == 8 and got["longlive"]["asked_frames"] == 7 and "noise_mask" not in got
    assert torch.equal(got["samples"], sample(wan, into=start_image(8)))


def test_a_mask_of_ones_is_no_start_image(wan, plain):
    given = latent(8)
    given["samples"] += 1
    given["noise_mask"] = torch.ones(1, 1, 8, 4, 4)
    got, _, shown = execute(wan, into=given)
    assert torch.equal(got["samples"], plain)
    assert "only the size of the latent is used, not what is in it" in shown


def test_a_picture_sized_mask_is_fitted(wan):
    """SetLatentNoiseMask gives (1, 1, height, width) in pixels: here the left half is kept in every frame."""
    given = latent(4)
    given["samples"] += 0.5
    given["noise_mask"] = torch.ones(1, 1, 64, 64)
    given["noise_mask"][..., :32] = 0
    got = sample(wan, into=given)
    assert torch.equal(got[..., :2], given["samples"][..., :2])
    assert difference(got[..., 2:], given["samples"][..., 2:]) > 0.1


def test_a_batch_has_a_start_image_in_every_row(wan):
    given = start_image(4, batch=2)
    given["samples"][1, :, 0] *= -1
    both = sample(wan, into=given)
    assert torch.equal(both[:, :, 0], given["samples"][:, :, 0])
    row = {"samples": given["samples"][:1], "noise_mask": given["noise_mask"][:1]}
    assert difference(both[:1], sample(wan, into=row)) < 1e-6


def test_masks_that_differ_within_a_batch_are_refused(wan):
    given = start_image(4, batch=2)
    given["noise_mask"][1] = 1
    with pytest.raises(ValueError, match="same frames in every row of the batch"):
        sample(wan, into=given)


def test_a_start_image_and_a_state_are_refused(wan):
    _, state, _ = execute(wan)
    with pytest.raises(ValueError, match="start image only fits the beginning of a video"):
        sample(wan, into=start_image(4), state=state)
    with pytest.raises(ValueError, match="start image only fits the beginning of a video"):
        sample(wan, into=start_image(4), extend=latent(4))


# Window


def test_a_window_larger_than_the_video_is_full_attention_to_the_past(wan, plain):
    """Three chunks fit a window of 6 and of 64 alike; from the fourth on they differ."""
    wide = sample(wan, window=64)
    assert difference(wide[:, :, :6], plain[:, :, :6]) < 1e-6
    assert difference(wide[:, :, 6:], plain[:, :, 6:]) > 1e-4


def test_a_chunk_larger_than_the_window_is_refused(wan):
    with pytest.raises(ValueError, match=r"window \(6 latent frames\) is smaller than one chunk \(8\)"):
        sample(wan, chunk=8)


@pytest.mark.parametrize("sink", [6, 9])
def test_a_sink_as_large_as_the_window_is_refused(wan, sink):
    with pytest.raises(ValueError, match=rf"sink \({sink} latent frames\) must be smaller than the window \(6\)"):
        sample(wan, sink=sink)


def test_a_sink_larger_than_a_chunk_and_one_that_leaves_no_room(wan):
    for sink in (0, 3, 5):
        got = sample(wan, sink=sink)
        assert got.shape[2] == 8 and torch.isfinite(got).all()


def test_noise_and_result_of_a_chunk_do_not_depend_on_the_length(wan, plain):
    long = sample(wan, into=latent(12))
    assert torch.equal(long[:, :, :8], plain)
    other = sample(wan, seed=4)
    assert difference(other, plain) > 0.1


def test_upstream_noise_order(wan, plain, monkeypatch):
    """One draw (B, frames, C, H, W) from the seed, sliced; a continued video goes on where it was, an extended one starts at its own row 0."""
    seen = []
    run = sampling.ChunkLoop.run

    def spy(self, plan, noise, clamp=None):
        seen.append(noise.initial(self.video.next_chunk))
        return run(self, plan, noise, clamp)

    monkeypatch.setattr(sampling.ChunkLoop, "run", spy)
    whole = torch.randn(1, 8, 48, 4, 4, generator=torch.Generator().manual_seed(3)).transpose(1, 2)
    got, state, _ = execute(wan, noise_order="upstream", keep_state="exact")
    assert torch.equal(torch.cat(seen, 2), whole)
    assert difference(got["samples"], plain) > 0.1
    seen.clear()
    sample(wan, into=latent(4), state=state, noise_order="upstream")
    longer = torch.randn(1, 12, 48, 4, 4, generator=torch.Generator().manual_seed(3)).transpose(1, 2)
    assert torch.equal(torch.cat(seen, 2), longer[:, :, 8:])
    seen.clear()
    sample(wan, into=latent(8), extend=got, noise_order="upstream")
    assert torch.equal(torch.cat(seen, 2), whole)


# Prompts


def test_a_batch_equals_its_rows_one_by_one(wan):
    """Two videos with a prompt each are the two videos made alone from the same noise."""
    both = sample(wan, timeline("0:00 a || b\n0:00.6 cut c || d"), latent(8, batch=2))
    alone = [
        sample_rows(wan, timeline("0:00 a\n0:00.6 cut c"), row=0),
        sample_rows(wan, timeline("0:00 b\n0:00.6 cut d"), row=1),
    ]
    assert difference(both, torch.cat(alone)) < 1e-6
    assert difference(*alone) > 1e-2


def sample_rows(model, positive, row):
    """One video with the noise of ``row`` of a batch."""
    from dataclasses import replace

    from longlive.accel.noise import ChunkNoise, GivenNoise
    from longlive.nodes.sampling import sample_video
    from longlive.nodes.sampling_job import SamplingRequest, recipe_of

    recipe = replace(recipe_of(model), steps=2, chunk_frames=2, window_frames=6, sink_frames=2)
    drawn = ChunkNoise(3, (row + 1, 48, 2, 4, 4))
    noise = GivenNoise(torch.cat([drawn.initial(chunk)[row:] for chunk in range(4)], 2), 2)
    return sample_video(model, positive, None, latent(8), SamplingRequest(recipe, park="none"), noise=noise).latent["samples"]


def test_plain_conditioning_of_a_batch(wan):
    """A prompt for each row, or one for all."""
    rows = torch.cat([text(0), text(1)])
    both = sample(wan, [[rows, {}]], latent(4, batch=2))
    assert difference(both[:1], sample(wan, prompt(0), latent(4))) < 1e-6
    shared = sample(wan, prompt(0), latent(4, batch=2))
    assert difference(shared[:1], both[:1]) < 1e-6 and difference(shared[1:], both[1:]) > 1e-3


@pytest.mark.parametrize(("rows", "batch"), [(2, 3), (3, 2), (2, 1)])
def test_ragged_prompt_lists_are_refused(wan, rows, batch):
    message = f"there are {rows} prompts side by side and the latent's batch is {batch}"
    with pytest.raises(ValueError, match=message):
        sample(wan, timeline(" || ".join("abc"[:rows])), latent(4, batch=batch))
    with pytest.raises(ValueError, match=message):
        sample(wan, [[text(0, batch=rows), {}]], latent(4, batch=batch))


def test_prompts_of_a_batch_may_differ_in_length(wan):
    """The rows of text after a prompt are zeros, as the text encoder pads them."""
    entries = timeline("0:00 a || b")
    entries[1][0] = entries[1][0][:, :3]
    both = sample(wan, entries, latent(4, batch=2))
    short = timeline("0:00 b")
    short[0][0] = short[0][0][:, :3]
    padded = torch.nn.functional.pad(short[0][0], (0, 0, 0, 509))
    joined = torch.cat([torch.nn.functional.pad(entries[0][0], (0, 0, 0, 452)), padded])
    assert difference(both, sample(wan, [[joined, {}]], latent(4, batch=2))) < 1e-6


def test_combined_prompts_are_refused(wan):
    with pytest.raises(ValueError, match="holds 2 combined prompts"):
        sample(wan, prompt(0) + prompt(1))
    with pytest.raises(ValueError, match="mixes a Prompt Timeline with other prompts"):
        sample(wan, timeline("a") + prompt(1))
    with pytest.raises(ValueError, match="combines two Prompt Timelines"):
        sample(wan, timeline("a") + timeline("b"))
    with pytest.raises(ValueError, match="positive CONDITIONING is empty"):
        sample(wan, [])
    with pytest.raises(ValueError, match="negative CONDITIONING holds 2"):
        sample(wan, cfg=3.0, negative=prompt(1) + prompt(2))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("area", {"area": (1, 1, 0, 0)}),
        ("mask", {"mask": torch.ones(1, 4, 4), "set_area_to_bounds": False, "mask_strength": 1.0}),
        ("timestep range", {"start_percent": 0.0, "end_percent": 0.5}),
        ("timestep range", {"start_percent": 0.2, "end_percent": 1.0}),
        ("control", {"control": object()}),
        ("reference latents", {"reference_latents": [torch.zeros(1, 48, 1, 4, 4)]}),
    ],
)
def test_conditioning_for_a_part_of_picture_or_steps_is_refused(wan, name, options):
    """Core would leave forwards out or crop them, and keys and values would be missing without a word."""
    entry = [[text(0), options]]
    with pytest.raises(ValueError, match=f"positive CONDITIONING carries .*{name}"):
        sample(wan, entry)
    with pytest.raises(ValueError, match=f"negative CONDITIONING carries .*{name}"):
        sample(wan, cfg=2.0, negative=entry)


def test_the_whole_timestep_range_is_no_range(wan, plain):
    assert torch.equal(sample(wan, [[text(0), {"start_percent": 0.0, "end_percent": 1.0}]]), plain)


def test_a_cut_changes_only_what_comes_after_it(wan, plain):
    lines = "0:00 a\n0:00.9 cut b"
    got, _, shown = execute(wan, timeline(lines), keep_state="none")
    first = sample(wan, timeline("0:00 a"))
    assert got["longlive"]["report"]["cuts"] == [3] and "cuts at chunk 3 (pinned, RoPE offset 8" in shown
    assert torch.equal(got["samples"][:, :, :6], first[:, :, :6])
    assert difference(got["samples"][:, :, 6:], first[:, :, 6:]) > 1e-2


def test_a_cut_is_more_than_a_new_prompt(wan):
    """The pin, the RoPE offset and the prefix each count: the same prompts with a switch give another video."""
    cut = sample(wan, timeline("0:00 a\n0:00.3 cut b"), latent(14))
    switch = sample(wan, timeline("0:00 a\n0:00.3 switch b"), latent(14))
    unpinned = sample(wan, timeline("0:00 a\n0:00.3 cut b"), latent(14), shot_pinning="off")
    without = sample(wan, timeline("0:00 a\n0:00.3 cut b"), latent(14), shot_rope_offset=0.0)
    assert difference(cut, switch) > 1e-2 and difference(cut, without) > 1e-2
    assert torch.equal(cut[:, :, :6], unpinned[:, :, :6]) and difference(cut[:, :, 6:], unpinned[:, :, 6:]) > 1e-3


# Guidance


def guided(model, rows=60, **widgets):
    return sample(model, prompt(0), negative=prompt(1, rows), cfg=3.0, **widgets)


@pytest.mark.parametrize("rows", [60, 120, 7, 180], ids=["same length", "twice as long", "no multiple", "three times as long"])
def test_guidance_is_the_same_split_and_batched(wan, monkeypatch, rows):
    """Core runs both prompts in one batch where memory allows and one by one where not; each branch keeps its own keys and values."""
    sizes = []
    forward = sampling.chunk_forward

    def spy(dit, x, context, call, *, branches, **kwargs):
        sizes.append(branches)
        return forward(dit, x, context, call, branches=branches, **kwargs)

    monkeypatch.setattr(sampling, "chunk_forward", spy)
    batched = guided(wan, rows)
    assert {len(branches) for branches in sizes} == {2}
    sizes.clear()
    run = sampling.ChunkLoop.run
    free = type(wan).get_free_memory

    def starved(self, *args):
        # Only while the chunks run: before, the sampler itself asks whether the cache fits.
        monkeypatch.setattr(type(wan), "get_free_memory", lambda self, device: 0)
        try:
            return run(self, *args)
        finally:
            monkeypatch.setattr(type(wan), "get_free_memory", free)

    monkeypatch.setattr(sampling.ChunkLoop, "run", starved)
    split = guided(wan, rows)
    assert {len(branches) for branches in sizes} == {1} and set(sizes) == {(0,), (1,)}
    assert difference(split, batched) < 5e-6
    assert difference(batched, sample(wan)) > 1e-2


def test_guidance_one_makes_no_second_branch(wan, plain, caches):
    assert torch.equal(sample(wan, negative=prompt(1)), plain)
    assert len(caches) == 1


def test_guidance_is_linear_in_its_scale(wan):
    """x0 of one step and chunk: uncond + scale * (cond - uncond), with both branches' windows their own."""
    one = dict(into=latent(2), steps=1)
    cond, uncond = sample(wan, prompt(0), **one), sample(wan, prompt(1), **one)
    for scale in (0.0, 0.5, 4.0):
        got = sample(wan, prompt(0), negative=prompt(1), cfg=scale, **one)
        assert difference(got, uncond + scale * (cond - uncond)) < 1e-5


def test_functions_that_call_the_model_again_leave_no_trace_in_the_cache(wan):
    """Perturbed-attention and skip-layer guidance run the prompt once more in a changed way, at every step and at sigma 0 as well."""
    calls = []

    def again(args):
        def spoilt(func, q, k, v, *rest, **options):
            return func(q, k, v + 1, *rest, **options)

        def spoil(args, extra):
            return {"img": extra["original_block"](args | {"img": args["img"] * 2})["img"]}

        options = comfy.model_patcher.create_model_options_clone(args["model_options"])
        options["transformer_options"]["optimized_attention_override"] = spoilt
        options["transformer_options"]["patches_replace"] = {"dit": {("double_block", 0): spoil}}
        comfy.samplers.calc_cond_batch(args["model"], [args["cond"]], args["input"], args["sigma"], options)
        calls.append(float(args["sigma"][0]))
        return args["denoised"]

    model = wan.clone()
    model.set_model_sampler_post_cfg_function(again)
    got, state, _ = execute(model, keep_state="exact")
    plain, expected, _ = execute(wan, keep_state="exact")
    assert len(calls) == 4 * 2 and torch.equal(got["samples"], plain["samples"])
    assert all(torch.equal(state.parked[name], expected.parked[name]) for name in expected.parked)


def test_a_cfg_function_is_used(wan, plain):
    """What other nodes put in place of the guidance formula: here it ignores the negative prompt."""
    model = wan.clone()
    model.set_model_sampler_cfg_function(lambda args: args["cond"])
    assert difference(sample(model, cfg=3.0, negative=prompt(1)), plain) < 5e-6


def test_guidance_without_a_negative_prompt_is_refused(wan):
    with pytest.raises(ValueError, match="CFG 3 needs a negative prompt and none is connected"):
        sample(wan, cfg=3.0)


# Extension


def test_extending_goes_on_after_the_given_video(wan):
    old = sample(wan, into=latent(4))
    got, _, shown = execute(wan, into=latent(4), extend={"samples": old}, seed=8)
    assert got["samples"].shape[2] == 8 and torch.equal(got["samples"][:, :, :4], old)
    assert got["longlive"]["report"]["first_chunk"] == 2
    other = sample(wan, into=latent(4), extend={"samples": old + 0.3}, seed=8)
    assert difference(other[:, :, 4:], got["samples"][:, :, 4:]) > 1e-3, "the new part sees the old one"


def test_extending_inside_the_window_is_going_on(wan, plain):
    """While nothing has been forgotten, clean passes over the finished latents rebuild exactly what sampling had cached."""
    got = sample(wan, into=latent(2), extend={"samples": plain[:, :, :4]})
    assert difference(got, plain[:, :, :6]) < 1e-5


def test_extending_a_video_longer_than_the_window(wan):
    given = torch.randn(1, 48, 14, 4, 4, generator=torch.Generator().manual_seed(1))
    got, _, _ = execute(wan, into=latent(3), extend={"samples": given})
    assert got["samples"].shape[2] == 18 and torch.equal(got["samples"][:, :, :14], given)
    assert got["longlive"]["asked_frames"] == 17


def test_extending_takes_whole_chunks_and_says_so(wan):
    given = {"samples": torch.randn(1, 48, 5, 4, 4, generator=torch.Generator().manual_seed(1))}
    got, _, shown = execute(wan, into=latent(2), extend=given)
    assert got["samples"].shape[2] == 6 and "has 5 latent frames; the first 4 (whole chunks of 2) are continued" in shown
    with pytest.raises(ValueError, match="has 1 latent frames; at least one whole chunk of 2 is needed"):
        sample(wan, extend=latent(1))


def test_extending_another_size_batch_or_kind_is_refused(wan):
    with pytest.raises(ValueError, match="latent to extend is batch 1, 6x4 .* the new part is batch 1, 4x4"):
        sample(wan, extend=latent(4, rows=6))
    with pytest.raises(ValueError, match="latent to extend is batch 2, 4x4 .* the new part is batch 1, 4x4"):
        sample(wan, extend=latent(4, batch=2))
    with pytest.raises(ValueError, match="latent to extend has 16 channels .* the model needs 48 channels"):
        sample(wan, extend=latent(4, channels=16))


def test_a_cut_at_the_join_of_an_extended_video(wan, plain):
    old = {"samples": plain[:, :, :4]}
    cut, _, _ = execute(wan, timeline("0:00 cut b"), latent(4), extend=old)
    assert cut["longlive"]["report"]["cuts"] == [2]
    straight = sample(wan, timeline("0:00 b"), latent(4), extend=old)
    assert difference(cut["samples"][:, :, 4:], straight[:, :, 4:]) > 1e-3


# Bad models and latents


@pytest.mark.parametrize(("model", "channels"), [("wan", 16), ("wan1", 48)])
def test_latents_of_the_other_release_are_refused_by_name(request, model, channels):
    names = {16: r"16 channels \(Wan 2.1, LongLive 1.0\)", 48: r"48 channels \(Wan 2.2, LongLive 2.0\)"}
    with pytest.raises(ValueError, match=f"the latent has {names[channels]} and the model needs {names[64 - channels]}"):
        sample(request.getfixturevalue(model), into=latent(4, channels=channels))


def test_an_image_latent_is_refused(wan):
    with pytest.raises(ValueError, match="the latent has 4 dimensions; a video latent has 5"):
        sample(wan, into={"samples": torch.zeros(1, 48, 4, 4)})


@pytest.mark.parametrize(("rows", "columns"), [(3, 4), (4, 5)])
def test_a_size_off_the_pixel_grid_is_refused(wan, rows, columns):
    message = f"size {columns * 16}x{rows * 16} pixels does not fit the Wan 2.2 VAE .* must be multiples of 32; width .* would work"
    with pytest.raises(ValueError, match=message):
        sample(wan, into=latent(4, rows=rows, columns=columns))


def other_wan(model_type, in_dim, **options):
    """A tiny core MODEL of another Wan family."""
    import comfy.ldm.wan.model
    import comfy.ops

    network = comfy.ldm.wan.model.WanModel(
        model_type=model_type, in_dim=in_dim, out_dim=16, dim=128, ffn_dim=256, num_heads=1, num_layers=1, device="cpu", dtype=torch.float32,
        operations=comfy.ops.disable_weight_init, **options,
    )
    state = {name: torch.zeros(tensor.shape) for name, tensor in network.state_dict().items()}
    return comfy.sd.load_diffusion_model_state_dict(state, model_options={"dtype": torch.float32})


def test_image_to_video_models_are_refused():
    with pytest.raises(ValueError, match="runs Wan text-to-video models .*image-to-video model with image cross-attention"):
        sample(other_wan("i2v", 36), into=latent(4, channels=16))
    # Wan 2.2's image-to-video model has no image cross-attention; it is known by its wider input.
    with pytest.raises(ValueError, match="takes 36 latent channels and gives 16"):
        sample(other_wan("t2v", 36), into=latent(4, channels=16))


def test_models_split_over_devices_or_context_windows_are_refused(wan):
    from comfy_extras.nodes_context_windows import WanContextWindowsManualNode

    windowed = WanContextWindowsManualNode.execute(
        wan,
        context_length=81,
        context_overlap=30,
        context_schedule="standard_static",
        fuse_method="pyramid",
        freenoise=False,
        context_stride=1,
        closed_loop=False,
    ).args[0]
    with pytest.raises(ValueError, match="context windows, which a KV cache cannot follow"):
        sample(windowed)
    # MultiGPU CFG Split puts its copies here (comfy.multigpu.create_multigpu_deepclones); it needs a second GPU to be run itself.
    split = wan.clone()
    split.set_additional_models("multigpu", [wan.clone()])
    with pytest.raises(ValueError, match="copies on several devices, which a KV cache cannot follow"):
        sample(split)


# LoRA, dtypes, quantised weights


def test_a_lora_on_the_model_counts_and_comes_off_again(wan, plain):
    with_lora, _ = comfy.sd.load_lora_for_models(wan, None, lora(), 1.0, 0.0)
    got = sample(with_lora)
    assert difference(got, plain) > 1e-2
    half, _ = comfy.sd.load_lora_for_models(wan, None, lora(), 0.5, 0.0)
    twice, _ = comfy.sd.load_lora_for_models(half, None, lora(), 0.5, 0.0)
    assert difference(sample(twice), got) < 1e-5, "two halves compose to the whole"
    assert torch.equal(sample(wan), plain), "the model itself is unpatched again"


def test_bfloat16_weights(plain):
    got = sample(lively_wan(dtype=torch.bfloat16))
    assert got.dtype == torch.float32 and 1e-4 < difference(got, plain) < 2e-2


def test_computing_in_bfloat16(plain):
    """As on a GPU; the cache takes the format that the patcher was told to compute in."""
    model = lively_wan(dtype=torch.bfloat16)
    model.set_model_compute_dtype(torch.bfloat16)
    got, state, _ = execute(model, keep_state="exact")
    assert got["samples"].dtype == torch.float32 and 1e-4 < difference(got["samples"], plain) < 3e-2
    assert got["longlive"]["report"]["kv_cache"]["dtype"] == "bfloat16"
    assert {tensor.dtype for tensor in state.parked.values()} == {torch.bfloat16}


@pytest.mark.parametrize(("dtype", "limit"), [("bfloat16", 1e-2), ("float16", 2e-3)])
def test_a_cache_in_another_number_format(wan, plain, dtype, limit):
    got, state, _ = execute(wan, kv_dtype=dtype, keep_state="exact")
    assert 1e-6 < difference(got["samples"], plain) < limit
    assert got["longlive"]["report"]["kv_cache"] == {"dtype": dtype, "bytes": 2 * LAYERS * 24 * 128 * 2}
    assert {tensor.dtype for tensor in state.parked.values()} == {getattr(torch, dtype)}
    more = sample(wan, into=latent(4), state=state, kv_dtype=dtype)
    assert torch.equal(more, sample(wan, into=latent(12), kv_dtype=dtype))


def quantised_file(path, algorithm):
    """The tiny model with its block linears in core's own quantised format, as a file."""
    import json

    from comfy.quant_ops import QUANT_ALGOS, QuantizedTensor
    from safetensors.torch import save_file

    state = {}
    for name, weight in tiny_weights(48, LAYERS, 128).items():
        if weight.ndim != 2 or not name.startswith("blocks."):
            state[name] = weight.to(torch.bfloat16)
            continue
        layer = name.removesuffix(".weight")
        packed = QuantizedTensor.from_float(weight.to(torch.bfloat16), QUANT_ALGOS[algorithm]["comfy_tensor_layout"], scale="recalculate")
        state |= {key: value.contiguous() for key, value in packed.state_dict(f"{layer}.weight").items()}
        state[f"{layer}.comfy_quant"] = torch.tensor(list(json.dumps({"format": algorithm}).encode()), dtype=torch.uint8)
    save_file(state, path)


@pytest.mark.parametrize("algorithm", ["float8_e4m3fn", "nvfp4"])
def test_weights_in_cores_quantised_formats(tmp_path, algorithm):
    quantised_file(tmp_path / "tiny.safetensors", algorithm)
    model = comfy.sd.load_diffusion_model(str(tmp_path / "tiny.safetensors"))
    assert type(model.model.diffusion_model.blocks[0].self_attn.q.weight.data).__name__ == "QuantizedTensor"
    expected = sample(tiny_wan(48, layers=LAYERS, dim=128, dtype=torch.bfloat16))
    got = sample(model)
    error = difference(got, expected)
    assert 1e-5 < error < 2e-2
    with_lora, _ = comfy.sd.load_lora_for_models(model, None, lora(), 1.0, 0.0)
    assert difference(sample(with_lora), got) > 1e-2


# What a run sees and leaves alone


def test_attention_calls_look_back_and_carry_the_layout(wan, calls):
    """q has the chunk, k the window; the tag names its frames slot by slot, the clean pass skips the last layer's attention."""
    seen, install = calls
    model = wan.clone()
    install(model)
    sample(model, timeline("0:00 a\n0:00.3 cut b"), latent(12), sink=2)
    tokens = 4
    windows = [(0, 1), (0, 1, 2, 3), (0, 1, 2, 3, 4, 5), (0, 1, 2, 3, 6, 7), (0, 1, 2, 3, 8, 9), (0, 1, 2, 3, 10, 11)]
    by_chunk = []
    for window in windows:
        step = [("self", 0, False), ("cross", 0, False), ("self", 1, False), ("cross", 1, False)]
        by_chunk += [(kind, layer, commit, window) for kind, layer, commit in [*step, *step, ("self", 0, True), ("cross", 0, True)]]
    assert len(seen) == len(by_chunk)
    for call, (kind, layer, commit, window) in zip(seen, by_chunk):
        tag = call["tag"]
        assert (tag["kind"], tag["layer"], tag["commit"]) == (kind, layer, commit)
        assert sorted(tag["window"]) == list(window)
        assert (tag["frame_tokens"], tag["chunk_frames"], tag["sink_frames"]) == (tokens, 2, 2)
        assert call["q"] == (1, 2 * tokens, 128)
        assert call["k"] == call["v"] == (1, (len(window) * tokens if kind == "self" else 512), 128)


def test_the_tags_window_is_in_the_order_of_the_keys(wan, monkeypatch):
    """Whoever reads the layout finds frame window[i] in the i-th frame of the keys: the newest chunk's keys are where the tag says."""
    caught = []

    def override(func, q, k, v, heads, *args, transformer_options=None, **kwargs):
        tag = transformer_options["longlive"]
        if tag["kind"] == "self" and tag["layer"] == 0 and tag["commit"]:
            caught.append((tag["window"], k.clone()))
        return func(q, k, v, heads, *args, transformer_options=transformer_options, **kwargs)

    model = wan.clone()
    model.model_options["transformer_options"] = {"optimized_attention_override": override}
    sample(model, into=latent(14), window=7, sink=1)
    for (before, old), (after, new) in zip(caught, caught[1:]):
        for slot, frame in enumerate(after):
            keys = new[:, slot * 4 : slot * 4 + 4]
            if frame in before:
                place = before.index(frame)
                assert torch.equal(keys, old[:, place * 4 : place * 4 + 4]), (frame, before, after)
            else:
                assert frame >= max(before), "only new frames have new keys"


def test_no_gradients_are_recorded(wan, calls):
    seen, install = calls
    model = wan.clone()
    install(model)
    with torch.enable_grad():
        model.model.diffusion_model.requires_grad_(True)
        try:
            got = sample(model, into=latent(4))
        finally:
            model.model.diffusion_model.requires_grad_(False)
    assert not got.requires_grad and not any(call["grad"] for call in seen)


def ksample(model, seed=5):
    """Core's own sampler on the same MODEL."""
    empty = torch.zeros(1, 48, 2, 4, 4)
    noise = comfy.sample.prepare_noise(empty, seed)
    return comfy.sample.sample(model, noise, 2, 3.0, "euler", "simple", prompt(0), prompt(1), empty, disable_pbar=True, seed=seed)


def test_core_sampling_on_the_same_model_is_unchanged(wan):
    before = ksample(wan)
    options, wrappers, patches = repr(wan.model_options), repr(wan.wrappers), wan.patches_uuid
    sample(wan)
    assert (repr(wan.model_options), repr(wan.wrappers), wan.patches_uuid) == (options, wrappers, patches)
    assert torch.equal(ksample(wan), before)


def test_no_global_random_state_is_touched(wan, wan1):
    numpy_state = numpy.random.get_state(legacy=False)["state"]["key"].copy()  # noqa: NPY002 (the global state is what is tested)
    states = torch.get_rng_state(), random.getstate()
    for model, channels in ((wan, 48), (wan1, 16)):
        for order in ("per chunk", "upstream"):
            sample(model, into=latent(4, channels=channels), noise_order=order)
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    assert (numpy.random.get_state(legacy=False)["state"]["key"] == numpy_state).all()  # noqa: NPY002


@pytest.fixture
def progress(monkeypatch):
    """(step, total, previewed latent, x) of every call of the host's callback."""
    seen = []
    hooks = []

    def prepare(model, steps, x0_output_dict=None):
        def callback(step, x0, x, total):
            seen.append((step, total, x0.clone(), x.clone()))
            for hook in hooks:
                hook(len(seen))

        assert steps > 0
        seen.append(("prepared", steps))
        return callback

    monkeypatch.setattr(latent_preview, "prepare_callback", prepare)
    return seen, hooks


def test_progress_per_forward_with_the_newest_frame(wan, progress):
    seen, _ = progress
    got = sample(wan)
    (_, prepared), *calls = seen
    assert prepared == len(calls) == 4 * (2 + 1)
    assert [(step, total) for step, total, _, _ in calls] == [(i, 12) for i in range(12)]
    normalised = wan.model.process_latent_in(got)
    for chunk in range(4):
        for step in range(3):
            _, _, shown, x = calls[3 * chunk + step]
            assert shown.shape == (1, 48, 1, 4, 4) and torch.equal(shown, x[:, :, -1:])
        assert difference(calls[3 * chunk + 2][2], normalised[:, :, 2 * chunk + 1 : 2 * chunk + 2]) < 1e-5, "the clean pass shows the finished frame"


@pytest.mark.parametrize("case", ["extend", "state", "switch 1.0", "switch 2.0"])
def test_progress_ends_at_its_total(wan, wan1, progress, case):
    """Passes over old frames count as well; the bar neither stops early nor overflows."""
    seen, _ = progress
    old, state, _ = execute(wan, into=latent(8))
    seen.clear()
    if case == "extend":
        sample(wan, into=latent(4), extend=old)
    elif case == "state":
        sample(wan, into=latent(4), state=state)
    elif case == "switch 2.0":
        sample(wan, timeline("0:00 a\n0:00.9 switch b"), recache_on_switch="on")
    else:
        sample(wan1, timeline("0:00 a\n0:01 switch b"), latent(12, channels=16), chunk=3, window=9, sink=3)
    (_, prepared), *calls = seen
    assert [step for step, *_ in calls] == list(range(prepared))


def test_everything_under_inference_mode(plain):
    """As ComfyUI runs nodes; a state that was made there goes on anywhere."""
    with torch.inference_mode():
        model = lively_wan()
        first, state, _ = execute(model, into=latent(4), keep_state="exact")
        assert torch.equal(sample(model, into=latent(4), state=state), plain)
        given = start_image(4)
        assert torch.equal(sample(model, into=given)[:, :, :1], given["samples"][:, :, :1])
        assert torch.equal(sample(model, into=latent(2), extend=first)[:, :, :4], first["samples"])
    assert torch.equal(sample(lively_wan(), into=latent(4), state=state), plain)


# Interrupt, failures, memory


def cache_bytes_alive():
    """Bytes of all tensors shaped like a window's keys: (1, window tokens, width)."""
    gc.collect()
    return sum(t.nbytes for t in gc.get_objects() if type(t) is torch.Tensor and t.shape == (1, 6 * 4, 128))


def test_an_interrupt_in_chunk_2_frees_the_cache(wan, plain, progress, caches):
    """It ends within one model call, and no key or value is left even while the exception is still being handled."""
    seen, hooks = progress
    forwards = []

    def interrupt(number):
        forwards.append(number)
        if number == 1 + 2 * 3 + 1:  # after the first step of chunk 2
            comfy.model_management.interrupt_current_processing(True)

    hooks.append(interrupt)
    with pytest.raises(comfy.model_management.InterruptProcessingException) as caught:
        sample(wan)
    assert len(forwards) == 7, "no further forward was finished"
    assert cache_bytes_alive() == 0
    assert caught.value is not None
    assert [ref() for ref in caches] == [None]
    hooks.clear()
    assert torch.equal(sample(wan), plain)
    assert [ref() for ref in caches] == [None, None]


def test_an_interrupt_inside_a_forward_frees_the_cache(wan, plain, caches):
    """Core's own operations raise it in the middle of a layer, where the window is in use."""
    model = wan.clone()
    count = 0

    def override(func, *args, **kwargs):
        nonlocal count
        count += 1
        if count == 27:
            comfy.model_management.interrupt_current_processing(True)
        return func(*args, **kwargs)

    model.model_options["transformer_options"] = {"optimized_attention_override": override}
    with pytest.raises(comfy.model_management.InterruptProcessingException) as caught:
        sample(model)
    assert count == 27
    assert cache_bytes_alive() == 0 and [ref() for ref in caches] == [None]
    assert caught.traceback
    assert torch.equal(sample(wan), plain)


def test_a_second_run_after_a_failure(wan, plain, caches):
    model = wan.clone()

    def broken(func, *args, **kwargs):
        raise RuntimeError("this kernel fails")

    model.model_options["transformer_options"] = {"optimized_attention_override": broken}
    with pytest.raises(RuntimeError, match="this kernel fails") as caught:
        sample(model)
    assert cache_bytes_alive() == 0
    assert "chunk_forward" in "".join(traceback.format_tb(caught.value.__traceback__)), "the traceback still tells where"
    assert torch.equal(sample(wan), plain)


def test_frames_of_an_error_that_was_there_before_are_left_alone(wan):
    """A caller that samples while it handles an error of its own still finds that error's variables."""

    def fail():
        evidence = "kept"
        raise KeyError(evidence)

    model = wan.clone()
    model.model_options["transformer_options"] = {"optimized_attention_override": lambda *args, **kwargs: 1 / 0}
    try:
        fail()
    except KeyError as error:
        with pytest.raises(ZeroDivisionError):
            sample(model)
        assert error.__traceback__.tb_next.tb_frame.f_locals == {"evidence": "kept"}


def test_a_finished_run_frees_the_cache(wan, caches):
    sample(wan, cfg=2.0, negative=prompt(1))
    execute(wan, keep_state="exact")
    gc.collect()
    assert [ref() for ref in caches] == [None] * 3


def test_a_cache_that_does_not_fit_names_its_size(wan, plain, caches):
    """2 layers x 10^9 frames x 4 tokens x 128 wide, keys and values, in float32."""
    with pytest.raises(torch.OutOfMemoryError) as caught:
        sample(wan, window=10**9)
    message = str(caught.value)
    assert "KV cache needs 8192.00 GB (1000000000 latent frames x 4 tokens, 2 layers, float32, 1 branch(es))" in message
    assert "GB are free on cpu" in message and "GB are missing" in message and "a smaller window" in message
    assert comfy.model_management.is_oom(caught.value), "core frees its models for it"
    with pytest.raises(torch.OutOfMemoryError, match="KV cache needs 16384.00 GB .*2 branch"):
        sample(wan, window=10**9, cfg=2.0, negative=prompt(1))
    assert caches == []
    assert torch.equal(sample(wan), plain)


def test_a_cache_that_fits_only_in_part_is_let_go(wan, monkeypatch):
    """The negative branch does not fit any more: the first branch's cache goes as well."""
    count = 0
    zeros = torch.zeros

    def some(*args, **kwargs):
        nonlocal count
        count += args and args[0] == (1, 24, 128)
        if count == 7:
            raise torch.OutOfMemoryError("out of memory")
        return zeros(*args, **kwargs)

    monkeypatch.setattr(kv_cache.torch, "zeros", some)
    with pytest.raises(torch.OutOfMemoryError, match="GB were free on cpu and the allocation failed: a smaller window") as caught:
        sample(wan, cfg=2.0, negative=prompt(1))
    monkeypatch.undo()
    assert count == 7 and caught.value.__cause__ is not None
    assert cache_bytes_alive() == 0


def test_memory_is_planned_for_one_chunk_after_the_cache(wan, monkeypatch):
    """Core plans with the chunk's shape, and the cache is already there when it asks what is free."""
    order = []
    monkeypatch.setattr(comfy.model_management, "free_memory", wraps(comfy.model_management.free_memory, lambda *a, **k: order.append(("free", a[0]))))
    load = comfy.model_management.load_models_gpu
    monkeypatch.setattr(comfy.model_management, "load_models_gpu", wraps(load, lambda *a, **k: order.append(("load", cache_bytes_alive()))))
    shapes = []
    required = type(wan.model).memory_required
    monkeypatch.setattr(type(wan.model), "memory_required", lambda self, shape, **k: (shapes.append(list(shape)), required(self, shape, **k))[1])
    sample(wan, into=latent(40))
    size = 2 * LAYERS * 24 * 128 * 4
    assert order[0][0] == "free" and order[0][1] > size and ("load", size) in order
    assert shapes and all(shape[2] == 2 for shape in shapes)


def wraps(function, note):
    def wrapped(*args, **kwargs):
        note(*args, **kwargs)
        return function(*args, **kwargs)

    return wrapped


def test_callbacks_of_the_patcher_fire(wan):
    """The accelerator and other nodes rely on them."""
    fired = []
    model = wan.clone()
    model.add_callback(CallbacksMP.ON_PRE_RUN, lambda patcher: fired.append("pre run"))
    model.add_callback(CallbacksMP.ON_CLEANUP, lambda patcher: fired.append("cleanup"))
    sample(model, into=latent(2))
    assert fired == ["pre run", "cleanup"]


# LongLive 1.0


FIRST = dict(chunk=3, window=9, sink=3)


def test_first_generation_samples_with_its_own_rules(wan1):
    got, state, shown = execute(wan1, into=latent(7, channels=16), **FIRST)
    assert got["samples"].shape == (1, 16, 9, 4, 4) and "longlive-1.0" in shown
    assert got["longlive"]["report"]["sigmas"] == [1.0, round(5 * 0.5 / 3, 6), 0.0]
    assert got["longlive"]["fps"] == LONGLIVE_1.fps == 16
    again = sample(wan1, into=latent(12, channels=16), **FIRST)
    assert torch.equal(again[:, :, :9], got["samples"]), "its fresh noise does not depend on the length either"


def test_a_switch_recaches_in_the_first_generation(wan1):
    lines = "0:00 a\n0:01 switch b"
    into = latent(12, channels=16)
    got, _, shown = execute(wan1, timeline(lines), into, **FIRST)
    assert got["longlive"]["report"]["switches"] == [2] and "prompt switches at chunk 2 (re-cached)" in shown
    without, _, shown = execute(wan1, timeline(lines), into, recache_on_switch="off", **FIRST)
    assert "(not re-cached)" in shown
    assert torch.equal(got["samples"][:, :, :6], without["samples"][:, :, :6])
    assert difference(got["samples"][:, :, 6:9], without["samples"][:, :, 6:9]) > 1e-4
    whole = sample(wan1, timeline(lines), into, recache_sink=True, **FIRST)
    assert torch.equal(whole[:, :, :6], got["samples"][:, :, :6])


def test_a_switch_does_not_recache_in_the_second_unless_asked(wan):
    lines = "0:00 a\n0:00.9 switch b"
    got, _, shown = execute(wan, timeline(lines), latent(10))
    assert got["longlive"]["report"]["switches"] == [3] and "(not re-cached)" in shown
    asked, _, shown = execute(wan, timeline(lines), latent(10), recache_on_switch="on")
    assert "prompt switches at chunk 3 (re-cached)" in shown
    off = sample(wan, timeline(lines), latent(10), recache_on_switch="off")
    assert torch.equal(got["samples"], off)
    assert torch.equal(asked["samples"][:, :, :6], off[:, :, :6]) and difference(asked["samples"][:, :, 6:], off[:, :, 6:]) > 1e-4


# One chunk without a past is core's own forward


def core_flow(model, x, timesteps, transformer_options):
    """``WanModel.forward`` itself, with the text padded as LongLive reads it."""
    rows = torch.nn.functional.pad(text(0), (0, 0, 0, 512 - 60)).repeat(x.shape[0], 1, 1)
    with torch.no_grad():
        return model.model.diffusion_model(x, timesteps, rows, transformer_options=transformer_options)


def patches(seen):
    """What other nodes hang into core's blocks: each kind changes the result and notes what it got."""

    def attn1(args):
        seen.append(("attn1", args["q"].shape, args["k"].shape))
        return args["x"] * (1 + 0.1 * args["q"].mean())

    def attn2(args):
        seen.append(("attn2", args["x"].shape))
        return args["x"] + 0.05

    def double(args):
        seen.append(("double", args["block_index"], args["img"].shape, args["x"].shape))
        return {"img": args["img"] * 1.05}

    def replace(args, extra):
        seen.append(("replace", args["img"].shape, args["txt"].shape))
        return {"img": extra["original_block"]({**args, "img": args["img"] * 0.9})["img"] * 1.02}

    return {
        "patches": {"attn1_patch": [attn1], "attn2_patch": [attn2], "double_block": [double]},
        "patches_replace": {"dit": {("double_block", 0): replace}},
    }


@pytest.mark.parametrize("patched", [False, True], ids=["plain", "patched"])
@pytest.mark.parametrize("given", [0, 1], ids=["text", "start image"])
def test_a_chunk_without_a_past_is_cores_own_forward(wan, patched, given):
    """x0 of the one step of one chunk from core's forward at LongLive's timestep, with the patches of other nodes in place in both."""
    theirs, ours = [], []
    model = wan.clone()
    if patched:
        model.model_options["transformer_options"] = patches(ours)
    into = start_image(4, given) if given else latent(4)
    got = wan.model.process_latent_in(sample(model, into=into, steps=1, chunk=4, window=4, sink=0))
    noise = sampling.ChunkNoise(3, (1, 48, 4, 4, 4)).initial(0)
    image = wan.model.process_latent_in(into["samples"])
    x = torch.cat([image[:, :, :given], noise[:, :, given:]], 2)
    times = torch.tensor([[0.0] * given + [999.0] * (4 - given)]) if given else torch.tensor([999.0])
    sigma = 0.999 * 5 / (1 + 4 * 0.999)
    expected = x - sigma * core_flow(wan, x, times, patches(theirs) if patched else {})
    assert difference(got[:, :, given:], expected[:, :, given:]) < 1e-5
    if patched:
        assert ours[: len(theirs)] == theirs, "the patches are called in the same places with the same shapes"
        assert difference(got, wan.model.process_latent_in(sample(wan, into=into, steps=1, chunk=4, window=4, sink=0))) > 1e-2


def test_patches_see_the_window(wan):
    seen = []
    model = wan.clone()
    model.model_options["transformer_options"] = {"patches": {"attn1_patch": [lambda args: (seen.append((args["q"], args["k"])), args["x"])[1]]}}
    sample(model, into=latent(4))
    assert [(q.shape[1], k.shape[1]) for q, k in seen if q.shape[1]] == [(8, 8)] * 5 + [(8, 16)] * 5
    assert all(q.shape[2:] == k.shape[2:] == (1, 128) for q, k in seen)
