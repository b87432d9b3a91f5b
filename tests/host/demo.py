"""`run.py demo`: a shipped workflow in a real headless ComfyUI, with the stand-in loaders of the tests in place of the three big files."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from .locate import Host, HostError
from .server import Client, Server
from .stand_in import with_stand_ins

DEMO_SIZE = (128, 64)  # pixels
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def make_video(host: Host, checkout: Path, name: str | None, say: Callable[[str], None]) -> Path:
    """Queue one workflow, wait, and return the path of its video in ``.comfy/demo``."""
    shipped = {path.stem: path for path in sorted((checkout / "workflows" / "api").glob("*.json"))}
    if not shipped:
        raise HostError("workflows/api holds no workflow; the demo queues one of those")
    chosen = name or next((stem for stem in shipped if "text_to_video" in stem), next(iter(shipped)))
    if chosen not in shipped:
        raise HostError(f"there is no workflow {chosen!r} in workflows/api; there are: {', '.join(shipped)}")
    workflow = with_stand_ins(json.loads(shipped[chosen].read_text(encoding="utf-8")), *DEMO_SIZE)
    say(f"workflow: {chosen}, with tiny random weights instead of a trained model: the video shows coloured noise, every step behind it is the real one")

    base = checkout / ".comfy" / "demo"
    packs = {"longlive-stream": checkout, "longlive_stand_in": checkout / "tests" / "pack" / "longlive_stand_in"}
    say("starting ComfyUI (10 to 60 s) ...")
    started = time.monotonic()
    with Server(host, base, packs, cpu=not _has_cuda(host)) as server:
        say(f"  ready after {time.monotonic() - started:.0f} s at {server.url}")
        client = Client(server.url)
        started = time.monotonic()
        prompt_id = client.queue(workflow)
        entry = client.wait(prompt_id, seconds=1800, alive=_Progress(server, say))
        say(f"  generated in {time.monotonic() - started:.0f} s")
        videos = [file for file in client.files(entry) if file["filename"].endswith(".mp4")]
    if not videos:
        raise HostError(f"the workflow {chosen} finished without a video; its outputs: {entry['outputs']}")
    file = videos[-1]
    made = base / file.get("type", "output") / file.get("subfolder", "") / file["filename"]
    # ComfyUI wipes its temporary folder when it next starts, so the video is kept beside the others.
    kept = base / "output" / file["filename"]
    if made != kept and made.is_file():
        shutil.copyfile(made, kept)
    return kept if kept.is_file() else made


class _Progress:
    """Called at every poll; speaks up every few seconds so that nobody waits before a silent screen."""

    def __init__(self, server: Server, say: Callable[[str], None]) -> None:
        self.server = server
        self.say = say
        self.started = time.monotonic()
        self.spoken = self.started

    def __call__(self) -> None:
        now = time.monotonic()
        if now - self.spoken < 3:
            return
        self.spoken = now
        if not self.server.is_running():
            raise HostError(f"ComfyUI ended while it was generating. The end of its log:\n{self.server.log_tail()}")
        log = _COLOURS.sub("", self.server.log_tail(2000)).replace("\r", "\n")
        lines = [line.strip() for line in log.splitlines() if line.strip()]
        self.say(f"  {now - self.started:.0f} s: {lines[-1] if lines else 'running'}")


def _has_cuda(host: Host) -> bool:
    code = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([str(host.python), "-c", code], capture_output=True).returncode == 0
