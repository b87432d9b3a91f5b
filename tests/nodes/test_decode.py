"""The VAE Stream Decode node in an in-process ComfyUI, with small VAEs in float32."""

import json
import os
import signal
import subprocess
import sys
import weakref
from pathlib import Path

import av
import comfy.model_management
import folder_paths
import numpy as np
import pytest
import safetensors.torch
import torch
from comfy_api.latest import InputImpl
from comfy_execution.graph_utils import ExecutionBlocker
from longlive.nodes import decode, vae_build
from longlive.nodes.decode import LongLiveStreamDecode
from longlive.nodes.video_file import QUEUE_STEPS
from longlive.tests import tiny_vae

import nodes as core_nodes

LIMITS_OF_H264 = 12  # mean difference of a decoded video from its frames, of 255; the frames are noise


@pytest.fixture(scope="module")
def vae22():
    return vae_build.build_vae(tiny_vae.wan22(4, 8).state_dict(), dtype=torch.float32)


@pytest.fixture(scope="module")
def vae21():
    return vae_build.build_vae(tiny_vae.wan21(8).state_dict(), dtype=torch.float32)


@pytest.fixture
def output(tmp_path, monkeypatch):
    """An empty output folder."""
    monkeypatch.setattr(folder_paths, "output_directory", str(tmp_path))
    return tmp_path


def run(samples, vae, **options):
    with torch.inference_mode():  # as the server runs every node
        return LongLiveStreamDecode.execute(samples, vae, **{"crf": 1, **options})


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def decode_video(path):
    with av.open(str(path)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def core_images(vae, samples):
    with torch.inference_mode():
        return core_nodes.VAEDecode().decode(vae, {"samples": samples})[0]


@pytest.mark.parametrize("name", ["vae22", "vae21"])
def test_images_equal_core_vae_decode(output, request, name):
    vae = request.getfixturevalue(name)
    z = tiny_vae.latents(vae.latent_channels, 5, batch=2)
    result = run({"samples": z}, vae, output="images")
    # Row by row: on the CPU a matrix product may round by the number of rows in it.
    assert torch.equal(result[1], torch.cat([core_images(vae, z[:1]), core_images(vae, z[1:])]))
    assert isinstance(result[0], ExecutionBlocker) and result[0].message is None
    assert files(output) == []


@pytest.mark.parametrize(("name", "fps"), [("vae22", 24), ("vae21", 16)])
def test_video_is_the_frames_core_would_save(output, request, name, fps):
    vae = request.getfixturevalue(name)
    z = tiny_vae.latents(vae.latent_channels, 4)
    result = run({"samples": z}, vae)
    assert files(output) == ["video/LongLive_00001_.mp4"]
    video = result[0]
    assert isinstance(video, InputImpl.VideoFromFile)
    assert video.get_frame_count() == 13 and float(video.get_frame_rate()) == fps
    assert isinstance(result[1], ExecutionBlocker)
    expected = (core_images(vae, z) * 255).byte().numpy().astype(int)
    decoded = decode_video(output / "video/LongLive_00001_.mp4")
    assert decoded.shape == expected.shape
    # Chroma is stored at half size, so colour noise is blurred; brightness is not.
    luma = np.array([0.299, 0.587, 0.114])
    assert np.abs(decoded @ luma - expected @ luma).mean() < LIMITS_OF_H264
    assert result.ui.as_dict()["images"][0]["filename"] == "LongLive_00001_.mp4"


def test_frames_reach_the_encoder_exactly_as_core_would_write_them(output, vae22, monkeypatch):
    pushed = []
    original = decode.VideoWriter.push
    monkeypatch.setattr(decode.VideoWriter, "push", lambda self, frames, *rest: (pushed.append(frames), original(self, frames, *rest))[1])
    z = tiny_vae.latents(48, 3)
    run({"samples": z}, vae22)
    assert torch.equal(torch.cat(pushed), (core_images(vae22, z) * 255).clamp(0, 255).byte())
    assert [len(frames) for frames in pushed] == [1, 4, 4]


def test_both_outputs(output, vae22):
    z = tiny_vae.latents(48, 2)
    result = run({"samples": z}, vae22, output="both")
    assert result[0].get_frame_count() == 5
    assert torch.equal(result[1], core_images(vae22, z))


def test_latents_past_the_asked_length_are_not_decoded(output, vae22, monkeypatch):
    shown = []
    monkeypatch.setattr(decode, "show_text", lambda cls, text: shown.append(text))
    z = tiny_vae.latents(48, 8)
    note = {"asked_frames": 6, "asked_pixel_frames": 19, "fps": 12, "chunk_frames": 4, "report": {}}
    result = run({"samples": z, "longlive": note}, vae22, output="both")
    assert torch.equal(result[1], core_images(vae22, z[:, :, :6])[:19])
    assert result[0].get_frame_count() == 19 and float(result[0].get_frame_rate()) == 12
    assert "2 of 8 latents lie past the asked length" in shown[0] and "2 frames past the asked 19" in shown[0]
    assert "bit-identical" in shown[0] and "libx264" in shown[0]


@pytest.mark.parametrize(("name", "first_frame"), [("vae22", 173), ("vae21", 173), ("vae21", 168), ("vae22", 3)])
def test_first_frame_equals_one_long_decode(output, request, name, first_frame):
    vae = request.getfixturevalue(name)
    z = tiny_vae.latents(vae.latent_channels, 46 if first_frame > 40 else 4)
    result = run({"samples": z}, vae, output="images", first_frame=first_frame)
    assert torch.equal(result[1], core_images(vae, z)[first_frame:])
    assert result[1].shape[0] == z.shape[2] * 4 - 3 - first_frame


def test_a_batch_gives_a_file_each(output, vae22):
    z = tiny_vae.latents(48, 2, batch=2)
    result = run({"samples": z}, vae22, filename_prefix="clip")
    assert files(output) == ["clip_00001_.mp4", "clip_00002_.mp4"]
    assert result[0].get_stream_source() == str(output / "clip_00001_.mp4")
    first, second = (decode_video(output / name).astype(int) for name in files(output))
    assert np.abs(first - second).mean() > 5
    assert [entry["filename"] for entry in result.ui.as_dict()["images"]] == files(output)
    run({"samples": z[:1]}, vae22, filename_prefix="clip")
    assert files(output)[-1] == "clip_00003_.mp4"


def test_workflow_and_report_are_in_the_file(output, vae22, monkeypatch):
    class Hidden:
        prompt = {"7": {"class_type": "LongLiveStreamDecode"}}
        extra_pnginfo = {"workflow": {"nodes": []}}
        unique_id = "7"

    monkeypatch.setattr(LongLiveStreamDecode, "hidden", Hidden)
    note = {"asked_frames": 2, "fps": 24, "report": {"seed": 5}}
    run({"samples": tiny_vae.latents(48, 2), "longlive": note}, vae22)
    with av.open(str(output / "video/LongLive_00001_.mp4")) as container:
        found = {key: json.loads(container.metadata[key]) for key in ("prompt", "workflow", "longlive")}
    assert found["prompt"] == Hidden.prompt and found["workflow"] == Hidden.extra_pnginfo["workflow"]
    assert found["longlive"]["report"] == {"seed": 5}
    assert found["longlive"]["decode"]["frames"] == 5 and found["longlive"]["decode"]["bit_exact"] is True


def test_progress_counts_latents_and_previews_frames(output, vae22, monkeypatch):
    seen = []
    monkeypatch.setattr(decode, "PREVIEW_SECONDS", 0.0)
    monkeypatch.setattr(decode.comfy.utils, "PROGRESS_BAR_HOOK", lambda value, total, preview, node_id=None: seen.append((value, total, preview)))
    run({"samples": tiny_vae.latents(48, 4)}, vae22, output="images")
    assert [value for value, _, _ in seen] == [0, 1, 2, 3, 4] and {total for _, total, _ in seen} == {4}
    assert seen[2][2][1].size == (48, 32)


def failing(vae, monkeypatch, error, after):
    """Make the decoder raise ``error`` in its step number ``after``."""
    decoder_class = decode.stream_decode.StreamDecoder22
    step, count = decoder_class._walk_step, []

    def walk(self, *arguments):
        count.append(None)
        if len(count) > after:
            raise error
        return step(self, *arguments)

    monkeypatch.setattr(decoder_class, "_walk_step", walk)


def kept_latent(folder):
    [latent] = [name for name in files(folder) if name.endswith(".latent")]
    return folder / latent


def test_out_of_memory_names_need_and_remedy_and_keeps_the_latents(output, vae22, monkeypatch):
    freed = []
    monkeypatch.setattr(comfy.model_management, "soft_empty_cache", lambda *rest: freed.append(None))
    failing(vae22, monkeypatch, torch.OutOfMemoryError("CUDA out of memory"), after=2)
    z = tiny_vae.latents(48, 5)
    with pytest.raises(RuntimeError) as raised:
        run({"samples": z, "longlive": {"asked_frames": 4}}, vae22)
    text = str(raised.value)
    for part in ("out of memory while decoding 48x32", "are needed beside", "were free", "pixels would fit", "VAE Decode (Tiled)", "The latents are kept in"):
        assert part in text, part
    assert freed and raised.value.__cause__ is None and raised.value.__context__ is None
    latent = kept_latent(output)
    assert str(latent) in text
    assert torch.equal(safetensors.torch.load_file(latent)["latent_tensor"], z)
    with safetensors.safe_open(latent, "pt") as file:
        assert json.loads(file.metadata()["longlive"])["asked_frames"] == 4
    # What was encoded is playable.
    [part] = [name for name in files(output) if name.endswith(".part.mp4")]
    assert len(decode_video(output / part)) == 5 and str(output / part) in text


def test_core_load_latent_reads_what_was_kept(output, vae22, monkeypatch):
    failing(vae22, monkeypatch, torch.OutOfMemoryError("CUDA out of memory"), after=0)
    z = tiny_vae.latents(48, 2)
    with pytest.raises(RuntimeError, match="out of memory"):
        run({"samples": z}, vae22, output="images")
    monkeypatch.setattr(folder_paths, "input_directory", str(kept_latent(output).parent))
    (loaded,) = core_nodes.LoadLatent().load(kept_latent(output).name)
    assert torch.equal(loaded["samples"], z)


def test_interrupt_keeps_the_latents_and_logs_where(output, vae22, caplog, monkeypatch):
    error = comfy.model_management.InterruptProcessingException()
    failing(vae22, monkeypatch, error, after=3)
    with pytest.raises(comfy.model_management.InterruptProcessingException):
        run({"samples": tiny_vae.latents(48, 5)}, vae22)
    assert str(kept_latent(output)) in caplog.text and "interrupted" in caplog.text


def test_interrupt_is_polled_between_latents(output, vae22, monkeypatch):
    steps = []
    original = decode.stream_decode.StreamDecoder22._walk_step
    interrupt = comfy.model_management.interrupt_current_processing

    def walk(self, *arguments):
        steps.append(None)
        result = original(self, *arguments)
        if len(steps) == 2:
            interrupt(True)
        return result

    monkeypatch.setattr(decode.stream_decode.StreamDecoder22, "_walk_step", walk)
    try:
        with pytest.raises(comfy.model_management.InterruptProcessingException):
            run({"samples": tiny_vae.latents(48, 6)}, vae22)
    finally:
        interrupt(False)
    assert len(steps) == 2


def test_encoder_error_keeps_the_latents(output, vae22, monkeypatch):
    def full(self, frame):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(decode.VideoWriter, "_mux", full)
    with pytest.raises(RuntimeError, match=r"No space left.*The latents are kept in .*LongLive_00001_.latent"):
        run({"samples": tiny_vae.latents(48, 4)}, vae22)
    assert kept_latent(output).is_file()


def test_a_second_run_after_a_failed_one_works(output, vae22, monkeypatch):
    with monkeypatch.context() as patch:
        failing(vae22, patch, torch.OutOfMemoryError("CUDA out of memory"), after=1)
        with pytest.raises(RuntimeError, match="out of memory"):
            run({"samples": tiny_vae.latents(48, 3)}, vae22)
    result = run({"samples": tiny_vae.latents(48, 3)}, vae22)
    assert result[0].get_stream_source().endswith("LongLive_00002_.mp4")


def test_images_that_do_not_fit_are_refused_before_decoding(output, vae22, monkeypatch):
    monkeypatch.setattr(comfy.model_management, "get_free_memory", lambda *rest: 100_000)
    monkeypatch.setattr(decode.stream_decode.StreamDecoder22, "_decode", lambda *rest: pytest.fail("decoded"))
    with pytest.raises(ValueError, match=r"9 frames at 48x32 needs 0\.17 MB of memory and 0\.10 MB are free\. Output video"):
        run({"samples": tiny_vae.latents(48, 3)}, vae22, output="images")
    assert files(output) == []


def test_latents_of_the_other_vae_are_refused_by_name(output, vae22, vae21):
    with pytest.raises(ValueError, match=r"16-channel latents \(LongLive 1.0 and Wan 2.1\).*VAE for 48 channels.*the Wan 2.1 VAE .* would work"):
        run({"samples": tiny_vae.latents(16, 2)}, vae22)
    with pytest.raises(ValueError, match=r"48-channel latents \(LongLive 2.0 and Wan 2.2 5B\).*VAE for 16 channels.*the Wan 2.2 VAE .* would work"):
        run({"samples": tiny_vae.latents(48, 2)}, vae21)


def test_wrong_inputs_are_refused_in_a_sentence(output, vae22):
    with pytest.raises(ValueError, match="first frame 5 was asked for, but the video has frames 0 to 4"):
        run({"samples": tiny_vae.latents(48, 2)}, vae22, first_frame=5)
    with pytest.raises(ValueError, match=r"latents of shape \(48, 2, 2\) cannot be decoded"):
        run({"samples": torch.zeros(48, 2, 2)}, vae22)
    with pytest.raises(ValueError, match="these latents are empty"):
        run({"samples": tiny_vae.latents(48, 0)}, vae22)


def test_speed_chooses_the_arithmetic_on_a_gpu(vae22, monkeypatch):
    monkeypatch.setattr(vae22, "device", torch.device("cuda"))
    monkeypatch.setattr(vae22, "vae_dtype", torch.bfloat16)
    fast, exact = (decode.make_plan(tiny_vae.latents(48, 2), {}, vae22, 0, 0, speed) for speed in ("fast", "exact"))
    assert not fast.options.is_exact and "up to rounding" in " ".join(fast.notes)
    assert exact.options.is_exact and not exact.notes


def test_unknown_choices_are_refused_by_name():
    assert LongLiveStreamDecode.validate_inputs("both", "exact") is True
    assert LongLiveStreamDecode.validate_inputs("film", "fast") == "output 'film' is not known; one of video, images, both would work"
    assert "speed 'warp' is not known" in LongLiveStreamDecode.validate_inputs("video", "warp")


def test_any_other_vae_decodes_in_one_go_and_says_so(output, monkeypatch):
    shown = []
    monkeypatch.setattr(decode, "show_text", lambda cls, text: shown.append(text))
    vae = vae_build.build_vae(tiny_vae.wan22(4, 8).state_dict(), dtype=torch.float32)

    class Other(torch.nn.Module):
        """A VAE that is not Wan's, 48 channels, same size of picture."""

        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def decode(self, z):
            return self.inner.decode(z)

    z = tiny_vae.latents(48, 3)
    expected = core_images(vae, z)
    vae.first_stage_model = Other(vae.first_stage_model)
    result = run({"samples": z}, vae, output="both", first_frame=1)
    assert torch.equal(result[1], expected[1:])
    assert result[0].get_frame_count() == 8
    assert "not streamed: Other is neither the Wan 2.2 nor the Wan 2.1 VAE" in shown[0]


def test_memory_does_not_grow_with_the_length(output, vae22, monkeypatch):
    """Frames alive at once: those of one step, and those that wait for the encoder."""
    alive, most = set(), []
    original = decode._to_host

    def to_host(frames):
        host, event = original(frames)
        alive.add(id(host))
        weakref.finalize(host, alive.discard, id(host))
        most.append(len(alive))
        return host, event

    monkeypatch.setattr(decode, "_to_host", to_host)
    run({"samples": tiny_vae.latents(48, 60, 1, 1)}, vae22)
    assert len(most) == 60
    assert max(most) <= QUEUE_STEPS + 3


CHILD = """
import os, signal, sys
sys.path.insert(0, {tests!r})
import bootstrap
import torch
torch.set_num_threads(1)
import folder_paths
from longlive.nodes import decode, vae_build
from longlive.tests import tiny_vae
folder_paths.output_directory = {output!r}
vae = vae_build.build_vae(tiny_vae.wan22(4, 8).state_dict(), dtype=torch.float32)
step = decode._Progress.step
def kill_in_chunk_2(self, done):
    # 8 latents are chunk 1; the run dies in the middle of chunk 2.
    if done == 12:
        print(decode_writer[0].frames_written, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    step(self, done)
decode._Progress.step = kill_in_chunk_2
decode_writer = []
init = decode.VideoWriter.__init__
def remember(self, *arguments):
    decode_writer.append(self)
    init(self, *arguments)
decode.VideoWriter.__init__ = remember
with torch.inference_mode():
    decode.LongLiveStreamDecode.execute({{"samples": tiny_vae.latents(48, 24)}}, vae)
"""


def test_a_run_killed_in_chunk_2_leaves_a_playable_part_and_the_latents(output, checkout, comfyui_path):
    code = CHILD.format(tests=str(checkout / "tests"), output=str(output))
    environment = {**os.environ, "COMFYUI_PATH": str(comfyui_path), "OMP_NUM_THREADS": "1"}
    child = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert child.returncode == -signal.SIGKILL, child.stderr[-3000:]
    written = int(child.stdout.split()[-1])
    assert written >= 29  # the whole of chunk 1
    assert files(output) == ["video/LongLive_00001_.latent", "video/LongLive_00001_.part.mp4"]
    # The newest frame becomes a fragment when the next one arrives.
    frames = decode_video(output / "video/LongLive_00001_.part.mp4")
    assert len(frames) >= written - 1 and frames.std() > 5
    latent = safetensors.torch.load_file(Path(output) / "video/LongLive_00001_.latent")["latent_tensor"]
    assert torch.equal(latent, tiny_vae.latents(48, 24))
