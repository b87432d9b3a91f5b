"""The two commands of this checkout: ``python run.py test`` and ``python run.py demo``.

Plain Python 3.10 or newer, standard library only. What is missing (a ComfyUI, pytest, comfy-cli) is installed into the ignored folder ``.comfy``; an existing
ComfyUI is used through COMFYUI_PATH and COMFYUI_PYTHON, or as the workspace of the `comfy` command, and nothing is installed into it.
"""

import argparse
import os
import re
import subprocess
import sys
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "tests"))

if sys.version_info < (3, 10):
    sys.exit(f"Python 3.10 or newer is needed, this is {sys.version.split()[0]}")

from host.install import Installer  # noqa: E402
from host.locate import Host, HostError, find_existing  # noqa: E402

# A runner's closing line, with or without its frame of = signs.
CLOSING_LINE = re.compile(r"\d+ (passed|failed|error|errors|deselected|skipped)\b.* in [\d.]+s|no tests ran in [\d.]+s")
# pytest lives outside the environment it runs in, and python_embeded ignores PYTHONPATH, so its folder is put on sys.path by hand (at the end: the host's own
# packages win).
RUN_PYTEST = "import runpy, sys; sys.path.append(sys.argv.pop(1)); runpy.run_module('pytest', run_name='__main__', alter_sys=True)"


def say(text: str) -> None:
    print(text, flush=True)


def prepare() -> tuple[Host, Installer]:
    """Find the ComfyUI to use, or install one."""
    installer = Installer(ROOT / ".comfy", say)
    host = find_existing() or installer.comfyui()
    say(f"ComfyUI: {host.comfyui} ({host.source}), Python: {host.python}")
    return host, installer


def test(pytest_arguments: list[str]) -> int:
    """Style, registry checks and all tests; with arguments, only pytest with those."""
    host, installer = prepare()
    tools = installer.test_tools(host.python)
    failed = [] if pytest_arguments else static_checks(installer.command_tools(), host)
    code, closing = run_pytest(host, tools, pytest_arguments)
    if failed:
        say(f"\nNot in order besides the tests: {', '.join(failed)} (their output is above)")
        say(closing)
    return code or len(failed)


def static_checks(commands: Path, host: Host) -> list[str]:
    """Run what needs no test runner; return the names of those that failed."""
    # comfy-cli calls ruff by name and takes the environment it works for from VIRTUAL_ENV.
    search_path = f"{commands}{os.pathsep}{os.environ.get('PATH', '')}"
    environment = {**os.environ, "PATH": search_path, "VIRTUAL_ENV": str(host.python.parent.parent), "DO_NOT_TRACK": "1"}
    suffix = ".exe" if os.name == "nt" else ""
    comfy = [str(commands / f"comfy{suffix}"), "--skip-prompt"]
    failed = []
    for name, command in (
        ("ruff check", [str(commands / f"ruff{suffix}"), "check", "."]),
        ("comfy node validate", [*comfy, "node", "validate"]),
        ("comfy node pack", [*comfy, "node", "pack"]),
    ):
        started = time.monotonic()
        result = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, encoding="utf-8", errors="replace", stdin=subprocess.DEVNULL
        )
        complaint = result.stdout + result.stderr if result.returncode else ""
        if name == "comfy node pack" and not complaint:
            complaint = pack_complaint(ROOT / "node.zip")
        say(f"{name}: {'FAILED' if complaint else 'ok'} ({time.monotonic() - started:.0f} s)")
        if complaint:
            failed.append(name)
            say(complaint.strip())
    # What `pack` leaves in the checkout; git ignores it.
    (ROOT / "node.zip").unlink(missing_ok=True)
    return failed


def pack_complaint(archive: Path) -> str:
    """What is wrong with the file list of the packed package; an empty string when nothing is."""
    with zipfile.ZipFile(archive) as packed:
        names = packed.namelist()
    missing = [name for name in ("__init__.py", "pyproject.toml", "requirements.txt", "LICENSE", "nodes/__init__.py") if name not in names]
    extra = [name for name in names if name.startswith(("tests/", ".ci/", "run.py"))]
    return (f"missing from the pack: {missing}. " if missing else "") + (f"should not be in the pack: {extra}" if extra else "")


def run_pytest(host: Host, tools: Path, arguments: list[str]) -> tuple[int, str]:
    """Run pytest in the host's Python; return (its exit code, its closing line)."""
    environment = {**os.environ, "COMFYUI_PATH": str(host.comfyui), "COMFYUI_PYTHON": str(host.python), "PYTHONIOENCODING": "utf-8", "PYTHONUNBUFFERED": "1"}
    command = [str(host.python), "-c", RUN_PYTEST, str(tools), *arguments]
    closing = "0 passed, 1 failed"
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8", errors="replace") as process:
        for line in process.stdout:
            sys.stdout.write(line)
            sys.stdout.flush()
            if CLOSING_LINE.search(line):
                closing = line.rstrip()
    return process.returncode, closing


def demo(options: argparse.Namespace) -> int:
    """Make a video through a shipped workflow in a real ComfyUI."""
    from host.demo import make_video

    host, installer = prepare()
    video = make_video(host, ROOT, options.workflow, say)
    say(f"\nThe video: {video}")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("test", help="run the checks and all tests; further arguments go to pytest, which then runs alone")
    demo_parser = commands.add_parser("demo", help="make a short video in a real ComfyUI and say where it is")
    demo_parser.add_argument("workflow", nargs="?", help="a name from workflows/api, without .json (default: the first text-to-video one)")
    # Everything behind `test` is pytest's, options included.
    options, pytest_arguments = parser.parse_known_args()
    if pytest_arguments and options.command != "test":
        parser.error(f"{options.command} does not know {' '.join(pytest_arguments)}")
    try:
        return test(pytest_arguments) if options.command == "test" else demo(options)
    except HostError as error:
        say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        say("stopped")
        return 130


if __name__ == "__main__":
    sys.exit(main())
