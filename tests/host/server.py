"""A real ComfyUI server as a child process with a base directory of its own, and a small client for its HTTP interface."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from .locate import Host, HostError

# Left out where a folder must be copied because links are refused.
_NOT_COPIED = shutil.ignore_patterns(".git", ".comfy", "__pycache__", "node_modules", "tests")


class Server:
    """``with Server(host, base, {"longlive-stream": checkout}) as server:`` starts it; leaving the block ends the whole process group."""

    def __init__(
        self,
        host: Host,
        base: Path,
        packs: Mapping[str, Path],
        *,
        cpu: bool = True,
        start_seconds: float = 180,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.host = host
        self.base = base
        self.packs = dict(packs)
        self.cpu = cpu
        self.start_seconds = start_seconds
        self.arguments = tuple(arguments)
        self.environment = dict(environment or {})
        self.log_path = base / "server.log"
        self.port = 0
        self._process: subprocess.Popen | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        return self._process.pid

    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start and wait until it answers; HostError with the end of its log when it does not."""
        for name in ("custom_nodes", "input", "output", "user", "models"):
            (self.base / name).mkdir(parents=True, exist_ok=True)
        for name, source in self.packs.items():
            link_or_copy(source, self.base / "custom_nodes" / name)
        for attempt in range(3):
            self.port = _free_port()
            self._launch()
            if self._wait_until_ready():
                return
            exit_code = self._process.poll()
            self.stop()
            # Another program may have taken the port between our look and ComfyUI's.
            if exit_code is None or "address already in use" not in self.log_tail(4000).lower() or attempt == 2:
                state = f"ended with code {exit_code}" if exit_code is not None else f"did not answer within {self.start_seconds:.0f} s"
                raise HostError(f"ComfyUI in {self.host.comfyui} {state}. The end of its log ({self.log_path}):\n{self.log_tail()}")

    def stop(self) -> None:
        """End the server and everything it started."""
        process, self._process = self._process, None
        if process is None:
            return
        if os.name == "nt":
            subprocess.run(["taskkill", "/T", "/F", "/PID", str(process.pid)], capture_output=True)
        else:
            for kill_signal, patience in ((signal.SIGTERM, 5), (signal.SIGKILL, 10)):
                try:
                    os.killpg(process.pid, kill_signal)
                except ProcessLookupError:
                    break
                try:
                    process.wait(patience)
                    break
                except subprocess.TimeoutExpired:
                    continue
        process.wait(10)

    def kill(self) -> None:
        """End it without any warning, as a power cut would."""
        if os.name == "nt":
            subprocess.run(["taskkill", "/T", "/F", "/PID", str(self._process.pid)], capture_output=True)
        else:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(10)
        self._process = None

    def log_tail(self, characters: int = 3000) -> str:
        return self.log_path.read_text(encoding="utf-8", errors="replace")[-characters:] if self.log_path.is_file() else "(no log)"

    def _launch(self) -> None:
        command = [
            str(self.host.python),
            str(self.host.comfyui / "main.py"),
            *("--base-directory", str(self.base)),
            *("--port", str(self.port)),
            *("--database-url", "sqlite:///:memory:"),
            "--disable-api-nodes",
            *(("--cpu",) if self.cpu else ()),
            *self.arguments,
        ]
        # Offline and quiet: nothing of what ComfyUI brings may look for anything outside.
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "PYTHONIOENCODING": "utf-8", **self.environment}
        own_group = {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP} if os.name == "nt" else {"start_new_session": True}
        with open(self.log_path, "wb") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=self.host.comfyui, env=environment, **own_group
            )

    def _wait_until_ready(self) -> bool:
        deadline = time.monotonic() + self.start_seconds
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                with urllib.request.urlopen(f"{self.url}/system_stats", timeout=5):
                    return True
            except OSError:
                time.sleep(0.2)
        return False


class QueueError(HostError):
    """The server refused or failed a workflow; ``details`` is its whole answer."""

    def __init__(self, message: str, details: object) -> None:
        super().__init__(message)
        self.details = details


class Client:
    """Talks to a server the way a script would: queue a workflow, poll its history, fetch the files."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.client_id = uuid.uuid4().hex

    def get(self, path: str, **query: str) -> object:
        """GET a JSON document."""
        return json.loads(self.fetch(path, **query))

    def fetch(self, path: str, **query: str) -> bytes:
        """GET raw bytes."""
        suffix = "?" + urllib.parse.urlencode(query) if query else ""
        with urllib.request.urlopen(self.url + path + suffix, timeout=60) as answer:
            return answer.read()

    def post(self, path: str, body: object) -> object:
        """POST a JSON document and read the answer, if there is one."""
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            text = answer.read()
        return json.loads(text) if text.strip() else None

    def queue(self, workflow: Mapping[str, object]) -> str:
        """Queue an API workflow; return its prompt id. QueueError carries the server's validation messages."""
        try:
            return self.post("/prompt", {"prompt": workflow, "client_id": self.client_id})["prompt_id"]
        except urllib.error.HTTPError as error:
            details = json.loads(error.read() or b"null")
            raise QueueError(f"the server refused the workflow: {json.dumps(details)}", details) from None

    def with_defaults(self, workflow: Mapping[str, dict]) -> dict[str, dict]:
        """The workflow with every widget it leaves out at its default, as a node dragged onto the canvas has it."""
        known = self.get("/object_info")
        full = {}
        for node_id, node in workflow.items():
            inputs = dict(node["inputs"])
            for name, (kind, *options) in known[node["class_type"]]["input"].get("required", {}).items():
                options = options[0] if options else {}
                choices = kind if isinstance(kind, list) else options.get("options")
                if name not in inputs and ("default" in options or choices):
                    first = choices[0] if choices else None
                    inputs[name] = options.get("default", first["key"] if isinstance(first, dict) else first)
            full[node_id] = {**node, "inputs": inputs}
        return full

    def wait(self, prompt_id: str, seconds: float = 300, alive: Callable[[], None] = lambda: None) -> dict:
        """Poll until the prompt is in the history; return its entry. ``alive`` is called at every poll.

        QueueError when a node failed, TimeoutError when it takes longer than ``seconds``.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            entry = self.get(f"/history/{prompt_id}").get(prompt_id)
            if entry is not None and entry.get("status", {}).get("completed") is not None:
                if entry["status"]["status_str"] != "success":
                    raise QueueError(_failure_text(entry), entry)
                return entry
            alive()
            time.sleep(0.1)
        raise TimeoutError(f"prompt {prompt_id} did not finish within {seconds:.0f} s")

    def run(self, workflow: Mapping[str, object], seconds: float = 300) -> dict:
        """Queue, wait, and return the history entry."""
        return self.wait(self.queue(workflow), seconds)

    def files(self, entry: Mapping[str, object]) -> list[dict]:
        """Every file that the nodes of a finished prompt reported, as {"filename", "subfolder", "type", "node"}."""
        found = []
        for node, outputs in entry["outputs"].items():
            for values in outputs.values():
                found += [{**value, "node": node} for value in values if isinstance(value, dict) and "filename" in value] if isinstance(values, list) else []
        return found

    def download(self, file: Mapping[str, str]) -> bytes:
        """The content of one entry of ``files``."""
        return self.fetch("/view", filename=file["filename"], subfolder=file.get("subfolder", ""), type=file.get("type", "output"))

    def interrupt(self) -> None:
        """Ask the server to stop what it is running."""
        self.post("/interrupt", {})


def link_or_copy(source: Path, target: Path) -> None:
    """Make a folder appear at ``target``: a link, or a copy where the system refuses links (Windows without developer mode)."""
    if target.is_symlink() or target.is_file():
        target.unlink()
    elif target.exists():
        shutil.rmtree(target)
    try:
        target.symlink_to(source, target_is_directory=True)
    except (OSError, NotImplementedError):
        shutil.copytree(source, target, ignore=_NOT_COPIED)


def _failure_text(entry: Mapping[str, object]) -> str:
    for kind, data in entry["status"].get("messages", []):
        if kind == "execution_error":
            return f"{data.get('node_type')} failed: {data.get('exception_type')}: {data.get('exception_message')}"
        if kind == "execution_interrupted":
            return f"interrupted in {data.get('node_type')}"
    return f"the prompt failed: {entry['status']}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
