"""The frozen cases still come out as they were, and a changed rule would be noticed. See ``tests/freeze_cases.py``."""

import pytest
import torch
from longlive.accel import sampler, solver, window
from longlive.accel.forward import ChunkCall
from longlive.tests import freeze_cases
from longlive.tests.freeze_cases import CASES, DATA, LIMIT, error_of, read, settings_of

FILES = sorted(DATA.glob("*.safetensors"))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return freeze_cases.load_models(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("name", CASES)
def test_frozen_case(models, name):
    settings, latents = read(DATA / f"{name}.safetensors")
    assert settings == settings_of(CASES[name]), "the case was changed without freezing it anew"
    assert error_of(models, settings, latents) < LIMIT


def test_every_file_is_a_case_and_all_are_small():
    assert [path.stem for path in FILES] == sorted(CASES)
    assert sum(path.stat().st_size for path in FILES) < 1e6


def test_inputs_are_the_same_bits_everywhere():
    """Checksums of what is drawn: integers below 2^24, so that no rounding depends on the machine."""
    numbers = freeze_cases.draw(7, 3, 50_000)
    whole = (numbers.double() * 1448.5).round()
    assert whole.abs().max() < 2**24 and torch.equal((whole / 1448.5).float(), numbers)
    assert int(whole.sum()) == 67810
    assert abs(numbers.mean().item()) < 0.01 and numbers.var().item() == pytest.approx(1, abs=0.02)


# Each changed setting is one rule off by a little. It must be far above the limit in the case that is there to see it.
CHANGED_SETTINGS = [
    ("t2v", "sink_frames", 1),
    ("t2v", "sink_frames", 3),
    ("t2v", "window_frames", 7),
    ("t2v", "window_frames", 9),
    ("t2v", "shift", 5.01),
    ("t2v", "steps", 3),
    ("t2v_chunk8", "sink_frames", 7),
    ("t2v_chunk8", "multi_shot_sink", False),
    ("one_cut", "multi_shot_sink", False),
    ("one_cut", "multi_shot_rope_offset", 7.0),
    ("cuts_4_9", "multi_shot_sink", False),
    ("cuts_recache", "shot_clean_recache", False),
    ("cuts_no_pin", "multi_shot_sink", True),
    ("cuts_ragged_window", "window_frames", 8),
    ("cuts_large_sink", "sink_frames", 4),
    ("recache_in_large_sink", "shot_clean_recache", False),
    ("no_sink", "sink_frames", 1),
    ("i2v", "independent_first_frame", False),
    ("relative_rope_cuts", "relative_rope", False),
    ("cfg_cuts", "guidance_scale", 3.01),
    ("steps3_cut", "shift", 5.01),
    ("steps8_shift3", "shift", 3.01),
    ("extension_past_the_window", "window_frames", 7),
    ("extension_cut", "multi_shot_rope_offset", 7.0),
    ("t_scale_cuts", "t_scale", 0.51),
    ("batch2_cuts", "multi_shot_sink", False),
    ("first_t2v", "window_frames", 11),
    ("first_t2v", "sink_frames", 2),
    ("first_switch", "switch_frames", "[9]"),
    ("first_switch_off_grid", "switch_frames", "[12]"),
    ("first_switch_no_global_sink", "global_sink", True),
    ("first_large_sink", "sink_frames", 5),
    ("first_ragged_window", "window_frames", 13),
]


@pytest.mark.parametrize(("name", "setting", "value"), CHANGED_SETTINGS, ids=str)
def test_a_changed_setting_is_noticed(models, name, setting, value):
    settings, latents = read(DATA / f"{name}.safetensors")
    assert settings.get(setting) != str(value)
    try:
        error = error_of(models, settings | {setting: str(value)}, latents)
    except AssertionError as other_shape:
        assert "expected" in str(other_shape)
        return
    assert error > 10 * LIMIT


def no_pin(monkeypatch):
    monkeypatch.setattr(window.Window, "pin", lambda self, length: None)


def pin_never_protected(monkeypatch):
    monkeypatch.setattr(window.Window, "protected", property(lambda self: max(self.global_sink, self.sink)))


def whole_timesteps_for_the_image(monkeypatch):
    class Clamp(sampler.Clamp):
        @property
        def frame_noise(self):
            return (1.0,) * self.mask.shape[2]

        frame_noise = frame_noise.setter(lambda self, value: None)

    from longlive.nodes import sampling_job

    monkeypatch.setattr(sampling_job, "Clamp", Clamp)


def fractional_timesteps(monkeypatch):
    monkeypatch.setattr(sampler, "network_timestep", lambda sigma, solver: sigma * 1000)


def truncated_timesteps(monkeypatch):
    monkeypatch.setattr(sampler, "network_timestep", lambda sigma, solver: float(int(sigma * 1000)))


def another_largest_sigma(monkeypatch):
    monkeypatch.setattr(solver, "_LARGEST_SIGMA", 0.9985)


def euler(monkeypatch):
    class Euler:
        def __init__(self, sigmas):
            self.sigmas, self.index = sigmas, 0

        def step(self, x, flow):
            self.index += 1
            return x + (self.sigmas[self.index] - self.sigmas[self.index - 1]) * flow

    monkeypatch.setattr(sampler, "FlowUniPC", Euler)


def no_clean_pass(monkeypatch):
    """The last denoising step's keys and values stay."""
    monkeypatch.setattr(sampler.ChunkLoop, "_commit", lambda self, x, start, prompt, **kwargs: None)


def no_recache(monkeypatch):
    monkeypatch.setattr(sampler.ChunkLoop, "recache", lambda self, prompt: None)


def positions_from_the_chunk(monkeypatch):
    def call(*args, **kwargs):
        kwargs["query_times"] = tuple(time - kwargs["query_times"][0] for time in kwargs["query_times"])
        return ChunkCall(*args, **kwargs)

    monkeypatch.setattr(sampler, "ChunkCall", call)


def a_frame_later(monkeypatch):
    """The second half of every chunk is one position late."""

    def call(*args, **kwargs):
        times = kwargs["query_times"]
        kwargs["query_times"] = tuple(time + (place >= len(times) / 2) for place, time in enumerate(times))
        return ChunkCall(*args, **kwargs)

    monkeypatch.setattr(sampler, "ChunkCall", call)


def a_text_row_less(monkeypatch):
    from longlive.accel import forward

    monkeypatch.setattr(forward, "TEXT_ROWS", 511)


CHANGED_RULES = [
    ("one_cut", no_pin),
    ("one_cut", pin_never_protected),
    ("cuts_4_9", pin_never_protected),
    ("cuts_large_sink", pin_never_protected),
    ("i2v", whole_timesteps_for_the_image),
    ("i2v_cuts", no_pin),
    ("t2v", fractional_timesteps),
    ("steps3_cut", fractional_timesteps),
    ("first_t2v", truncated_timesteps),
    ("t2v", another_largest_sigma),
    ("t2v", euler),
    ("steps8_shift3", euler),
    ("t2v", no_clean_pass),
    ("first_switch", no_recache),
    ("first_switch_early", no_recache),
    ("first_batch2", no_recache),
    ("t2v", positions_from_the_chunk),
    ("t2v_chunk8", a_frame_later),
    ("grid_6x8", a_frame_later),
    ("t2v", a_text_row_less),
]


@pytest.mark.parametrize(("name", "change"), CHANGED_RULES, ids=lambda value: getattr(value, "__name__", value))
def test_a_changed_rule_is_noticed(models, monkeypatch, name, change):
    settings, latents = read(DATA / f"{name}.safetensors")
    change(monkeypatch)
    assert error_of(models, settings, latents) > 5 * LIMIT


@pytest.mark.parametrize("name", ["batch2_cuts", "first_batch2"])
def test_exchanged_prompts_of_a_batch_are_noticed(models, monkeypatch, name):
    settings, latents = read(DATA / f"{name}.safetensors")
    make = freeze_cases.make_inputs

    def exchanged(settings):
        tensors = make(settings)
        return tensors | {"prompt_index": tensors["prompt_index"].flip(0)}

    monkeypatch.setattr(freeze_cases, "make_inputs", exchanged)
    assert error_of(models, settings, latents) > 10 * LIMIT
