"""The Chunked Sampler node around the sampling: its inputs, what they default to, what it shows and hands on."""

import inspect
import sys
import types
from dataclasses import replace

import pytest
import torch
from comfy_execution.graph import ExecutionBlocker
from longlive.accel.config import Recipe
from longlive.accel.presets import LONGLIVE_2
from longlive.nodes import sampling_job
from longlive.nodes.loader import RECIPE_ATTACHMENT
from longlive.nodes.sampler import LongLiveChunkedSampler
from longlive.tests.nodes.chunked import difference, execute, latent, prompt, sample, timeline
from longlive.tests.nodes.tiny_wan import lively_wan

AUTO = dict(steps=0, chunk=0, window=0, sink=-1)
# A checkpoint that wants something else in every respect.
OWN = Recipe("longlive-2.0", 2, 8, 4, 3, 4.0, "unipc", False, 3.0, True, 12, ("steps 3: from the file name 'x-S3'",))


@pytest.fixture(scope="module")
def wan():
    return lively_wan()


@pytest.fixture(scope="module")
def attached(wan):
    model = wan.clone()
    model.set_attachments(RECIPE_ATTACHMENT, OWN)
    return model


def test_schema():
    schema = LongLiveChunkedSampler.GET_SCHEMA()
    assert (schema.node_id, schema.display_name, schema.category) == ("LongLiveChunkedSampler", "Chunked Sampler", "LongLive")
    by_id = {item.id: item for item in schema.inputs}
    assert all(item.tooltip for item in (*schema.inputs, *schema.outputs))
    # Positional in saved workflows: new widgets go to the end, before the optional links.
    assert list(by_id) == [
        *("model", "positive", "latent", "seed", "steps", "cfg", "keep_state", "shift", "chunk", "window", "sink", "shot_pinning", "shot_rope_offset"),
        *("clean_recache", "recache_on_switch", "recache_sink", "relative_rope", "time_scale", "kv_dtype", "noise_order", "negative", "extend", "state"),
    ]
    simple = {"model", "positive", "latent", "seed", "steps", "cfg", "keep_state", "negative", "extend", "state"}
    assert {name for name, item in by_id.items() if not item.advanced} == simple
    assert {name for name, item in by_id.items() if item.optional} == {"negative", "extend", "state"}
    parameters = inspect.signature(LongLiveChunkedSampler.execute).parameters
    assert list(parameters) == list(by_id)
    for name, item in by_id.items():
        if getattr(item, "default", None) is not None:
            assert parameters[name].default == item.default, name


def test_unknown_options_are_refused_before_anything_runs(wan):
    validate = LongLiveChunkedSampler.validate_inputs
    combos = {item.id: item.options for item in LongLiveChunkedSampler.GET_SCHEMA().inputs if hasattr(item, "options")}
    assert set(combos) == set(inspect.signature(validate).parameters), "core checks a combo itself, with a bare list, unless it is named"
    assert validate() is True
    for name, options in combos.items():
        for option in options:
            assert validate(**{name: option}) is True
        message = f"{name} 'banana' is not known; one of {', '.join(options)} would work"
        assert validate(**{name: "banana"}) == message
        with pytest.raises(ValueError, match=message):  # through a link, where validate_inputs sees nothing
            execute(wan, **{name: "banana"})


def test_widgets_at_auto_take_what_the_loader_attached(attached):
    got, state, shown = execute(attached, timeline("0:00 a\n0:00.9 cut b"), latent(8, fps=24), **AUTO)
    report = got["longlive"]["report"]
    for name in ("chunk_frames", "window_frames", "sink_frames", "steps", "shift"):
        assert report[name] == getattr(OWN, name)
    assert state.recipe == OWN and state.offsets == (0.0,) * 6 + (3.0,) * 2 and state.window["pin_start"] == -1
    assert "8 latent frames" in shown and "3 steps (shift 4)" in shown and "window 8 latent frames, sink 4" in shown
    assert "not pinned, RoPE offset 3 latent frames each" in shown
    assert "note: steps 3: from the file name 'x-S3'" in shown and "set on the Chunked Sampler" not in shown


def test_a_set_widget_wins_and_the_node_says_which(attached):
    widgets = dict(steps=2, shift=5.0, chunk=4, window=12, sink=0, shot_pinning="on", shot_rope_offset=8.0, recache_on_switch="off")
    _, state, shown = execute(attached, timeline("0:00 a"), latent(8), **widgets)
    names = dict(chunk="chunk_frames", window="window_frames", sink="sink_frames", shot_pinning="shot_pin")
    expected = {names.get(name, name): {"on": True, "off": False}.get(value, value) for name, value in widgets.items()}
    for name, value in expected.items():
        assert getattr(state.recipe, name) == value
        assert f"note: {name} {value} set on the Chunked Sampler (the model's own: {getattr(OWN, name)})" in shown
    assert state.recipe == replace(OWN, **expected, notes=state.recipe.notes)


@pytest.mark.parametrize("widget", [dict(steps=2), dict(shift=5.0), dict(window=6), dict(sink=2), dict(shot_rope_offset=8.0)])
def test_each_widget_changes_the_result(attached, widget):
    positive = timeline("0:00 a\n0:01.5 cut b")
    base = sample(attached, positive, latent(12), **AUTO)
    assert difference(sample(attached, positive, latent(12), **AUTO | widget), base) > 1e-3


@pytest.mark.parametrize("widget", [dict(relative_rope=True), dict(time_scale=0.5), dict(clean_recache=True)])
def test_each_option_changes_the_result_and_is_in_the_report(wan, widget):
    positive = timeline("0:00 a\n0:01.5 cut b")
    got, _, _ = execute(wan, positive, latent(14), **widget)
    assert got["longlive"]["report"]["cuts"] == [5]
    assert difference(got["samples"], sample(wan, positive, latent(14))) > 1e-4
    (name,) = widget
    assert got["longlive"]["report"][name] == widget[name]


def test_an_option_without_effect_is_said(wan):
    _, _, shown = execute(wan, clean_recache=True, shot_pinning="off")
    assert "clean_recache has no effect: it needs shot pinning and a sink" in shown
    _, _, shown = execute(wan, clean_recache=True)
    assert "no effect" not in shown


def test_a_model_of_another_loader_gets_its_release_from_the_channels(wan):
    _, state, shown = execute(wan)
    assert replace(state.recipe, notes=()) == replace(LONGLIVE_2, chunk_frames=2, window_frames=6, sink_frames=2, steps=2)
    assert "defaults of longlive-2.0: guessed from 48 latent channels, because no Load LongLive DiT node made this MODEL" in shown
    _, state, shown = execute(lively_wan(16), into=latent(6, channels=16), **AUTO)
    assert state.recipe.name == "longlive-1.0" and "guessed from 16 latent channels" in shown


def test_the_releases_defaults_at_full_chunk(wan):
    """Nothing set at all: chunks of 8, a window of 32, 4 steps."""
    got, state, shown = execute(wan, into=latent(9), **AUTO)
    assert got["samples"].shape[2] == 16 and state.chunk_lengths == (8, 8)
    assert "2 chunks of 8 latent frames, 4 steps (shift 5), CFG 1, seed 3" in shown and "window 32 latent frames, sink 8" in shown
    assert "asked for 9 latent frames; chunks have 8, so 16 are made" in shown


@pytest.mark.parametrize(("mode", "kind"), [("light", "light"), ("exact", "exact")])
def test_the_state_output(wan, mode, kind):
    _, state, shown = execute(wan, keep_state=mode)
    assert state.is_exact == (mode == "exact") and f"state: {kind}, 8 latent frames, " in shown
    assert state.latents.device.type == "cpu" and state.latents.shape == (1, 48, 8, 4, 4)


def test_no_state_blocks_what_hangs_on_it(wan):
    _, state, shown = execute(wan, keep_state="none")
    assert isinstance(state, ExecutionBlocker) and state.message is None and "state" not in shown


def test_an_exact_state_needs_room_on_the_host(wan, monkeypatch):
    size = 2 * 2 * 6 * 4 * 128 * 4
    free = types.SimpleNamespace(available=size - 1)
    monkeypatch.setattr(sampling_job, "psutil", types.SimpleNamespace(virtual_memory=lambda: free))
    with pytest.raises(ValueError, match="keeping an exact state needs .* GB of host memory and .* are free; choose `light`"):
        execute(wan, keep_state="exact")
    execute(wan, keep_state="light")
    free.available = size
    execute(wan, keep_state="exact")
    with pytest.raises(ValueError, match="keeping an exact state"):
        execute(wan, keep_state="exact", cfg=2.0, negative=prompt(1))


def test_the_report_says_what_ran(wan):
    got, _, shown = execute(wan, timeline("0:00 a\n0:00.6 cut b"), cfg=2.0, negative=prompt(1), seed=11)
    report = got["longlive"]["report"]
    assert (report["chunks"], report["first_chunk"], report["cfg"], report["seed"], report["cuts"]) == (4, 0, 2.0, 11, [2])
    assert report["kv_cache"] == {"dtype": "float32", "bytes": 2 * 2 * 2 * 24 * 128 * 4}
    assert report["attention"] is None and "attention: ComfyUI's own (no Attention Accelerator on this MODEL)" in shown
    assert "CFG 2, seed 11" in shown
    import json

    assert json.loads(json.dumps(report)) == report, "it goes into files"


def test_text_rows_past_512_are_said_to_be_left_out(wan):
    long = [[torch.cat([prompt(0, 512)[0][0], prompt(1, 30)[0][0]], 1), {}]]
    got, _, shown = execute(wan, long)
    assert "a prompt has 542 rows of text; the model reads the first 512" in shown
    assert torch.equal(got["samples"], sample(wan, prompt(0, 512)))


def test_the_text_goes_to_the_node_in_the_frontend(wan, monkeypatch):
    texts = []
    server = types.ModuleType("server")
    server.PromptServer = types.SimpleNamespace(
        instance=types.SimpleNamespace(send_progress_text=lambda text, node_id, sid=None: texts.append((text, node_id)))
    )
    monkeypatch.setitem(sys.modules, "server", server)
    monkeypatch.setattr(LongLiveChunkedSampler, "hidden", types.SimpleNamespace(unique_id="9"))
    _, _, shown = execute(wan)
    assert texts == [(shown, "9")]


@pytest.mark.parametrize("seed", [0, 2**63, 2**64 - 1])
@pytest.mark.parametrize("order", ["per chunk", "upstream"])
def test_every_seed_the_widget_allows(wan, seed, order):
    got = sample(wan, into=latent(2), seed=seed, noise_order=order)
    assert torch.isfinite(got).all() and torch.equal(got, sample(wan, into=latent(2), seed=seed, noise_order=order))


def test_a_sampling_shift_set_on_the_model_is_said_to_be_unused(wan):
    from comfy_extras.nodes_model_advanced import ModelSamplingSD3

    shifted = ModelSamplingSD3().patch(wan, 3.0)[0]
    assert "shift 5 is used; the MODEL's own sampling shift 3" in execute(shifted, into=latent(2))[2]
    assert "own sampling shift" not in execute(shifted, into=latent(2), shift=3.0)[2]


def test_inputs_without_effect_are_said(wan):
    shown = execute(wan, into=latent(2), negative=prompt(1), recache_sink=True)[2]
    assert "the negative prompt is not used: CFG is 1" in shown
    assert "recache_sink has no effect: recache_on_switch is off" in shown
    quiet = execute(wan, into=latent(2), recache_sink=True, recache_on_switch="on")[2]
    assert "not used" not in quiet and "no effect" not in quiet


def test_easycache_on_the_model_is_said(wan):
    from comfy_extras.nodes_easycache import EasyCacheNode

    cached = EasyCacheNode.execute(wan, 0.2, 0.15, 0.95, False).args[0]
    assert "EasyCache on the MODEL skips denoising passes" in execute(cached, into=latent(2))[2]
