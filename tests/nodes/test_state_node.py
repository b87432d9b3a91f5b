"""Continuing a video: from a state in memory, from a saved file, exactly and nearly, and what is refused."""

import copy
import dataclasses
import json
import os
import types

import comfy.sd
import folder_paths
import pytest
import torch
from longlive.accel import state as states
from longlive.accel.state import load_state
from longlive.nodes import state as state_node
from longlive.nodes.state import LongLiveLoadState, LongLiveSaveState, saved_states, state_folder
from longlive.tests.nodes.chunked import difference, execute, latent, lora, prompt, sample, timeline
from longlive.tests.nodes.tiny_wan import lively_wan
from safetensors import safe_open
from safetensors.torch import save_file


@pytest.fixture(scope="module")
def wan():
    return lively_wan()


@pytest.fixture(scope="module")
def wan1():
    return lively_wan(16)


@pytest.fixture(scope="module")
def long(wan):
    """Eight chunks in one run: what every continued video is compared with."""
    return sample(wan, into=latent(16))


@pytest.fixture(scope="module")
def exact(wan):
    return execute(wan, into=latent(8), keep_state="exact")[1]


@pytest.fixture(scope="module")
def light(exact):
    return exact.light()


@pytest.fixture(autouse=True)
def output(tmp_path):
    """An output folder of the test's own."""
    before = folder_paths.get_output_directory()
    folder_paths.set_output_directory(str(tmp_path))
    yield tmp_path
    folder_paths.set_output_directory(before)


def save(state, **widgets):
    return LongLiveSaveState.execute(state, **widgets).args[0]


def load(name):
    return LongLiveLoadState.execute(path=name).args[0]


# Exact


@pytest.mark.parametrize("through_file", [False, True], ids=["in memory", "through a file"])
@pytest.mark.parametrize("parts", [(2, 14), (6, 10), (8, 2, 6), (2, 2, 2, 2, 8)], ids=str)
def test_exact_parts_equal_one_run_bit_for_bit(wan, long, parts, through_file):
    state, got = None, None
    for frames in parts:
        got, state, shown = execute(wan, into=latent(frames), keep_state="exact", **({} if state is None else {"state": state}))
        assert ("continued from parked keys and values" in shown) == (frames is not parts[0] or got["longlive"]["report"]["first_chunk"] > 0)
        if through_file:
            state = load(save(state))
    assert got["samples"].shape[2] == 16 and torch.equal(got["samples"], long)


def test_an_exact_state_under_other_loras_is_not_called_bit_equal(wan):
    one, other = (comfy.sd.load_lora_for_models(wan, None, lora(seed=seed), 1.0, 0.0)[0] for seed in (2, 3))
    again = comfy.sd.load_lora_for_models(wan, None, lora(seed=2), 1.0, 0.0)[0]
    _, state, _ = execute(one, into=latent(4), keep_state="exact")
    for model, note in ((again, ": bit-equal to an uninterrupted run"), (other, "made under other LoRAs"), (wan, "made under other LoRAs")):
        assert note in execute(model, into=latent(2), state=load(save(state)))[2]


def test_exact_parts_with_guidance(wan):
    guided = dict(cfg=3.0, negative=prompt(1), keep_state="exact")
    whole = sample(wan, into=latent(12), **guided)
    _, state, _ = execute(wan, into=latent(8), **guided)
    assert {name.split(".")[0] for name in state.parked} == {"0", "1"}
    assert torch.equal(sample(wan, into=latent(4), state=load(save(state)), **guided), whole)


def test_exact_parts_of_a_batch(wan):
    whole = sample(wan, timeline("0:00 a || b"), latent(12, batch=2))
    _, state, _ = execute(wan, timeline("0:00 a || b"), latent(8, batch=2), keep_state="exact")
    assert torch.equal(sample(wan, timeline("0:00 a || b"), latent(4, batch=2), state=state), whole)


@pytest.mark.parametrize("options", [{}, {"clean_recache": True}, {"relative_rope": True}, {"shot_pinning": "off"}, {"time_scale": 0.5}], ids=str)
def test_a_cut_at_the_join_and_one_before_it(wan, options):
    """The pin of the first part's cut, the shot's RoPE offset and the window go on as if nothing had happened; the second cut is the third shot."""
    whole = execute(wan, timeline("0:00 a\n0:00.6 cut b\n0:01.2 cut c"), latent(16), **options)[0]
    assert whole["longlive"]["report"]["cuts"] == [2, 4]
    _, state, _ = execute(wan, timeline("0:00 a\n0:00.6 cut b"), latent(8), keep_state="exact", **options)
    got, after, _ = execute(wan, timeline("0:00 cut c"), latent(8), state=load(save(state)), **options)
    assert got["longlive"]["report"]["cuts"] == [4] and after.shot == 2
    assert torch.equal(got["samples"], whole["samples"])
    # The same timeline, with times of the whole video.
    again = sample(wan, timeline("0:00 a\n0:00.6 cut b\n0:01.2 cut c", origin="video"), latent(8), state=state, **options)
    assert torch.equal(again, whole["samples"])


@pytest.mark.parametrize("sink_too", [False, True])
def test_the_first_generation_with_a_switch_at_the_join(wan1, sink_too):
    """1.0 re-caches the newest frames at the switch: the state holds the latents for it."""
    widgets = dict(chunk=3, window=9, sink=3, recache_sink=sink_too, keep_state="exact")
    whole = sample(wan1, timeline("0:00 a\n0:03.1 switch b"), latent(18, channels=16), **widgets)
    assert difference(whole, sample(wan1, timeline("0:00 a"), latent(18, channels=16), **widgets)) > 1e-3
    _, state, _ = execute(wan1, timeline("0:00 a"), latent(12, channels=16), **widgets)
    got, _, _ = execute(wan1, timeline("0:00 switch b"), latent(6, channels=16), state=load(save(state)), **widgets)
    assert got["longlive"]["report"]["switches"] == [4] and torch.equal(got["samples"], whole)


def test_the_upstream_noise_order_goes_on_in_one_row(wan):
    """With batch 1 a longer draw begins with the shorter one, so that parts equal one run here as well."""
    whole = sample(wan, into=latent(12), noise_order="upstream")
    _, state, _ = execute(wan, into=latent(8), noise_order="upstream", keep_state="exact")
    assert torch.equal(sample(wan, into=latent(4), state=state, noise_order="upstream"), whole)


def test_the_old_part_comes_back_as_it_was(wan, exact):
    old = sample(wan, into=latent(8))
    for state in (exact, exact.light()):
        assert torch.equal(sample(wan, into=latent(2), state=state)[:, :, :8], old)


def test_a_start_image_is_still_there_in_the_second_part(wan):
    from longlive.tests.nodes.chunked import start_image

    whole = sample(wan, into=start_image(12))
    _, state, _ = execute(wan, into=start_image(8), keep_state="exact")
    assert difference(sample(wan, into=latent(4), state=state), whole) < 1e-6


def test_steps_shift_seed_prompt_and_guidance_may_change(wan, exact):
    base = sample(wan, into=latent(4), state=exact)
    for widgets in (dict(steps=3), dict(shift=3.0), dict(seed=9), dict(positive=prompt(4)), dict(cfg=2.0, negative=prompt(1))):
        got, _, shown = execute(wan, into=latent(4), state=exact, **widgets)
        assert torch.equal(got["samples"][:, :, :8], base[:, :, :8]) and difference(got["samples"][:, :, 8:], base[:, :, 8:]) > 1e-3
        assert ("the state was made without a negative branch" in shown) == ("cfg" in widgets)


def test_another_shot_offset_is_refused_only_after_a_cut(wan, exact):
    assert execute(wan, into=latent(2), state=exact, shot_rope_offset=3.0)[1].recipe.shot_rope_offset == 3.0
    _, cut, _ = execute(wan, timeline("0:00 a\n0:00.6 cut b"), latent(8), keep_state="exact")
    with pytest.raises(ValueError, match="state was made with shot RoPE offset 8.0 and now shot RoPE offset 3.0 is asked"):
        execute(wan, into=latent(2), state=cut, shot_rope_offset=3.0)


def test_the_state_carries_the_accelerators_report_and_where_the_new_part_begins(wan):
    from longlive.accel.plan import AttentionRequest
    from longlive.nodes.accelerate import accelerate

    accelerated, _ = accelerate(wan, AttentionRequest("auto"), "7")
    _, state, _ = execute(accelerated, into=latent(3), keep_state="light")
    attention = load(save(state)).report["attention"]
    assert attention["requested"] == "auto" and attention["effective"] and attention["why"] and attention["node_id"] == "7"
    # 3 latent frames asked of chunks of 2: the second part begins after 4 latent frames = 13 frames.
    assert "the new part follows 13 frames: whole chunks" in execute(wan, into=latent(2), state=state)[2]


# States are not changed


def frozen(state):
    """Everything a state holds, copied."""
    return copy.deepcopy({field.name: getattr(state, field.name) for field in dataclasses.fields(state)})


def same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return one == other


@pytest.mark.parametrize("kind", ["exact", "light"])
def test_two_runs_from_one_state_are_the_same(wan, kind, request):
    """ComfyUI hands the same cached object to every run."""
    state = request.getfixturevalue(kind)
    before = frozen(state)
    runs = [sample(wan, timeline("0:00 cut b"), latent(6), state=state) for _ in range(2)]
    assert torch.equal(*runs)
    assert same(before, frozen(state))
    with pytest.raises(dataclasses.FrozenInstanceError):
        state.seed = 1


def test_a_state_survives_an_interrupted_run(wan, exact, long, monkeypatch):
    import comfy.model_management

    before = frozen(exact)
    monkeypatch.setattr("latent_preview.prepare_callback", lambda *args: lambda *args: comfy.model_management.interrupt_current_processing(True))
    with pytest.raises(comfy.model_management.InterruptProcessingException):
        sample(wan, into=latent(4), state=exact)
    monkeypatch.undo()
    assert same(before, frozen(exact))
    assert torch.equal(sample(wan, into=latent(4), state=exact), long[:, :, :12])


# Light


def test_light_is_close_and_says_so():
    """The rebuilt chunks do not see what the window has forgotten; that shows from the third layer on."""
    wan = lively_wan(layers=3)
    long, light = sample(wan, into=latent(16)), execute(wan, into=latent(8))[1]
    got, _, shown = execute(wan, into=latent(8), state=light)
    assert "rebuilt by clean passes under the new prompt (the state holds none): close to, but not bit-equal with, an uninterrupted run" in shown
    assert torch.equal(got["samples"][:, :, :8], long[:, :, :8])
    assert 1e-5 < difference(got["samples"][:, :, 8:], long[:, :, 8:]) < 0.5


@pytest.mark.parametrize("frames", [2, 4, 6])
def test_light_inside_the_first_window_is_the_same_to_rounding(wan, long, frames):
    _, state, _ = execute(wan, into=latent(frames))
    assert difference(sample(wan, into=latent(16 - frames), state=state), long) < 1e-5


@pytest.mark.parametrize("options", [{}, {"shot_pinning": "off"}, {"relative_rope": True}, {"sink": 3}, {"sink": 0}, {"window": 7}], ids=str)
def test_light_holds_the_same_frames_as_exact(wan, options):
    """What is rebuilt is the window that was there: sink, pin, newest; and it goes on in the same way."""
    lines = "0:00 a\n0:01.2 cut b"
    _, state, _ = execute(wan, timeline(lines), latent(14), keep_state="exact", **options)
    ends = [execute(wan, timeline("0:00 b"), latent(6), state=kept, **options)[1] for kept in (state, state.light())]
    windows = [end.to_video().window for end in ends]
    assert windows[0].frames() == windows[1].frames() and windows[0].pin_start == windows[1].pin_start
    assert difference(ends[1].latents, ends[0].latents) < 0.5


def test_light_in_the_first_generation(wan1):
    widgets = dict(chunk=3, window=9, sink=3)
    _, state, _ = execute(wan1, into=latent(6, channels=16), **widgets)
    whole = sample(wan1, into=latent(9, channels=16), **widgets)
    got = sample(wan1, into=latent(3, channels=16), state=state, **widgets)
    # 1.0 keeps the sink's keys from the first chunk's own passes, so that the rebuilt ones are the same.
    assert difference(got, whole) < 1e-5


# What does not fit


OTHER = {
    "channels": (lambda: lively_wan(16), dict(channels=16), "latent channels 48 in the state, 16 now"),
    "width": (lambda: lively_wan(dim=256), {}, "model width 128 in the state, 256 now"),
    "layers": (lambda: lively_wan(layers=1), {}, "layers 2 in the state, 1 now"),
    "weights": (lambda: lively_wan(seed=1), {}, "made with another checkpoint of the same shape"),
    "batch": (None, dict(batch=2), "batch size 1 in the state, 2 now"),
    "rows": (None, dict(rows=6), "latent rows 4 in the state, 6 now"),
    "columns": (None, dict(columns=8), "latent columns 4 in the state, 8 now"),
}


@pytest.mark.parametrize("what", OTHER)
def test_a_state_of_another_model_or_size_is_refused(wan, exact, light, what):
    make, size, message = OTHER[what]
    for state in (exact, light):
        with pytest.raises(ValueError, match=message):
            sample(wan if make is None else make(), into=latent(4, **size), state=state)


@pytest.mark.parametrize(
    ("widgets", "message"),
    [
        (dict(chunk=3), "made with chunk 2 and now chunk 3 is asked; set it back to 2"),
        (dict(window=8), "made with window 6 and now window 8 is asked"),
        (dict(sink=3), "made with sink 2 and now sink 3 is asked"),
        (dict(shot_pinning="off"), "made with shot pinning True and now shot pinning False is asked"),
        (dict(relative_rope=True), "made with relative RoPE False and now relative RoPE True is asked, so its keys do not fit"),
        (dict(time_scale=0.5), "made with time scale 1.0 and now time scale 0.5 is asked, so its keys do not fit"),
    ],
    ids=str,
)
def test_a_state_of_other_settings_is_refused(wan, exact, light, widgets, message):
    for state in (exact, light):
        with pytest.raises(ValueError, match=message):
            sample(wan, into=latent(6), state=state, **widgets)


def test_keys_of_another_number_format_are_refused(wan, exact, light):
    message = "state's keys and values are float32 and a KV cache of bfloat16 is asked, .* set kv_dtype to float32, or save the state as light"
    with pytest.raises(ValueError, match=message):
        sample(wan, into=latent(4), state=exact, kv_dtype="bfloat16")
    sample(wan, into=latent(4), state=light, kv_dtype="bfloat16")


def test_a_state_and_a_latent_to_extend_are_refused(wan, exact):
    with pytest.raises(ValueError, match="both a state and a latent to extend are connected"):
        sample(wan, into=latent(4), state=exact, extend=latent(4))


# Files


def test_a_saved_state_is_the_same_state(exact, light):
    for state in (exact, light):
        again = load(save(state))
        for field in dataclasses.fields(state):
            if field.name not in ("window", "report"):  # their keys and tuples come back as JSON has them
                assert same(getattr(state, field.name), getattr(again, field.name)), field.name
        assert json.loads(json.dumps(state.report)) == again.report
        assert state.to_video().window == again.to_video().window


def test_names_are_counted_up_and_nothing_is_overwritten(light, output):
    names = [save(light, name="clips/fox") for _ in range(3)]
    assert names == ["clips/fox_00001_.safetensors", "clips/fox_00002_.safetensors", "clips/fox_00003_.safetensors"]
    assert save(light, name="  ") == "video_00001_.safetensors"
    assert state_folder() == output / "longlive_states" and sorted(saved_states()) == [*names, "video_00001_.safetensors"]
    assert [path.name for path in state_folder().rglob("*.part")] == []


def test_saved_states_are_listed_newest_first(light):
    names = [save(light, name=name) for name in ("b", "a", "c")]
    for age, name in enumerate(names):
        os.utime(state_folder() / name, (1e9 - age, 1e9 - age))
    (state_folder() / "note.txt").write_text("no state")
    assert saved_states() == names


def test_saving_as_light_leaves_keys_and_values_out(exact):
    output = LongLiveSaveState.execute(exact, content="light")
    again = load(output.args[0])
    assert exact.is_exact and not again.is_exact and torch.equal(again.latents, exact.latents)
    (shown,) = output.ui.as_dict()["text"]
    assert shown.startswith("saved video_00001_.safetensors\nlight (keys and values are rebuilt: close to, not bit-equal)")
    (shown,) = LongLiveSaveState.execute(exact).ui.as_dict()["text"]
    assert "exact (keys and values included: continues bit-equal)" in shown
    assert "8 latent frames in 4 chunks, 1 shot(s), batch 1, 48 channels, 4x4 latent rows x columns" in shown
    assert "longlive-2.0: chunk 2, window 6, sink 2" in shown


def test_an_unknown_content_is_refused(light):
    message = "content 'half' is not known; one of as given, light would work"
    assert LongLiveSaveState.validate_inputs(content="as given") is True and LongLiveSaveState.validate_inputs(content="half") == message
    with pytest.raises(ValueError, match=message):
        save(light, content="half")


def test_the_file_has_tensors_and_plain_text_only(exact):
    with safe_open(state_folder() / save(exact), framework="pt") as file:
        assert file.metadata().keys() == {"format", "version", "state"}
        assert set(file.keys()) == {"latents"} | {f"kv.0.{name}.{layer}" for name in ("keys", "values") for layer in range(2)}


def test_a_name_cannot_leave_the_folder(light, output):
    with pytest.raises(Exception, match="outside the output folder|output directory"):
        save(light, name="../../elsewhere")
    assert [path for path in output.rglob("*.safetensors") if state_folder() not in path.parents] == []
    outside = output / "outside.safetensors"
    (state_folder() / save(light)).rename(outside)
    for name in ("../outside.safetensors", str(outside)):
        assert "lies outside output/longlive_states; choose a file from the list" in LongLiveLoadState.validate_inputs(file=name)
        with pytest.raises(ValueError, match="lies outside output/longlive_states"):
            load(name)


def test_a_missing_file_names_what_there_is(light):
    with pytest.raises(ValueError, match="there is no saved state 'x.safetensors' in output/longlive_states; none has been saved yet"):
        load("x.safetensors")
    name = save(light)
    with pytest.raises(ValueError, match=f"no saved state 'x.safetensors' .*; there are: {name}"):
        load("x.safetensors")
    assert LongLiveLoadState.validate_inputs(file="x.safetensors") is True, "it may be saved by the same graph"


def bad_files():
    def truncated(path):
        path.write_bytes(path.read_bytes()[:-100])

    def other_tensors(path):
        save_file({"weight": torch.zeros(2)}, path)

    def other_version(path):
        with safe_open(path, framework="pt") as file:
            save_file({"latents": file.get_tensor("latents")}, path, metadata=file.metadata() | {"version": "99"})

    def no_header(path):
        save_file({"latents": torch.zeros(1)}, path, metadata={"format": states.FORMAT, "version": str(states.VERSION)})

    def odd_header(path):
        with safe_open(path, framework="pt") as file:
            save_file({"latents": file.get_tensor("latents")}, path, metadata=file.metadata() | {"state": '{"shot": 0}'})

    def wrong_length(path):
        with safe_open(path, framework="pt") as file:
            save_file({"latents": file.get_tensor("latents")[:, :, :3].contiguous()}, path, metadata=file.metadata())

    def half_the_keys(path):
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys() if name != "kv.0.values.1"}
            save_file(tensors, path, metadata=file.metadata())

    return {
        "truncated": (truncated, "cannot be read as a saved LongLive state"),
        "empty": (lambda path: path.write_bytes(b""), "cannot be read as a saved LongLive state"),
        "git lfs pointer": (lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"), "cannot be read as a saved"),
        "html": (lambda path: path.write_text("<!DOCTYPE html><html>404</html>"), "cannot be read as a saved LongLive state"),
        "pickle": (lambda path: torch.save({"latents": torch.zeros(1)}, path), "cannot be read as a saved LongLive state"),
        "other tensors": (other_tensors, "is a safetensors file but not a saved LongLive state"),
        "newer version": (other_version, "has state version 99, this package reads version 1"),
        "no header": (no_header, "its description is damaged"),
        "odd header": (odd_header, "its description is damaged"),
        "wrong length": (wrong_length, "its description is damaged"),
        "half the keys": (half_the_keys, "its description is damaged"),
    }


@pytest.mark.parametrize("kind", bad_files())
def test_damaged_and_foreign_files_are_refused_in_words(exact, kind):
    name = save(exact)
    path = state_folder() / name
    damage, message = bad_files()[kind]
    damage(path)
    with pytest.raises(ValueError, match=message) as caught:
        load(name)
    assert str(caught.value).startswith(name) and ("Save LongLive State" in str(caught.value) or "sample the video again" in str(caught.value))


def test_a_failed_save_leaves_nothing_behind(light, monkeypatch):
    import safetensors.torch

    def full(tensors, path, metadata):
        path.write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(OSError, match="No space left"):
        save(light)
    assert [path for path in state_folder().rglob("*") if path.is_file()] == []
    monkeypatch.undo()
    assert load(save(light)).num_frames == 8


def test_a_file_larger_than_the_free_memory_is_refused(exact, monkeypatch):
    name = save(exact)
    size = (state_folder() / name).stat().st_size
    monkeypatch.setattr(state_node, "psutil", types.SimpleNamespace(virtual_memory=lambda: types.SimpleNamespace(available=size - 1)))
    with pytest.raises(ValueError, match=f"{name} holds .* GB and .* GB of host memory are free; save the state as light"):
        load(name)


def test_a_changed_file_is_loaded_again(light):
    name = save(light)
    before = LongLiveLoadState.fingerprint_inputs(file=name)
    assert LongLiveLoadState.fingerprint_inputs(file=name) == before
    os.utime(state_folder() / name, (1e9, 1e9))
    assert LongLiveLoadState.fingerprint_inputs(file=name) != before
    assert LongLiveLoadState.fingerprint_inputs(path=name) == LongLiveLoadState.fingerprint_inputs(file=name)


def test_the_connected_name_wins_over_the_list(exact, light):
    first, second = save(exact), save(light)
    output = LongLiveLoadState.execute(file=first, path=second)
    assert not output.args[0].is_exact and output.ui.as_dict()["text"][0].startswith(f"loaded {second}\nlight")
    assert LongLiveLoadState.execute(file=first).args[0].is_exact


def test_loading_does_not_keep_the_file_open(light):
    """Windows could not overwrite or delete it otherwise, and a changed file would change the state."""
    name = save(light)
    path = state_folder() / name
    state = load_state(path)
    before = state.latents.clone()
    path.write_bytes(b"\0" * path.stat().st_size)
    assert torch.equal(state.latents, before)


@pytest.mark.parametrize(("node", "name"), [(LongLiveSaveState, "Save LongLive State"), (LongLiveLoadState, "Load LongLive State")])
def test_schemas(node, name, light):
    save(light)
    schema = node.GET_SCHEMA()
    assert (schema.node_id, schema.display_name, schema.category) == (node.__name__, name, "LongLive")
    assert all(item.tooltip for item in (*schema.inputs, *schema.outputs))
    assert schema.is_output_node == (node is LongLiveSaveState)
    if node is LongLiveLoadState:
        files = next(item for item in schema.inputs if item.id == "file")
        assert files.options == saved_states()
