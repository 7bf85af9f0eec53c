"""Run Pants' graph checks and package the wheels.

Pants 2.17.1 is the newest that installs with pip, and it runs under Python 3.9 only (the code it builds runs on 3.11).
This script finds a Python 3.9, keeps Pants in `.venv-pants`, and runs

1. `pants tailor --check ::`   every source file belongs to a target,
2. `pants dependencies ::`     every import has an owner and none breaks a visibility rule (the layer rule),
3. `pants package packages::`  the four wheels and source distributions, in `dist/`.

Pants wants the pex tool for the third step and would fetch it from the web; here it is built from the `pex` package
instead. The settings this takes belong to one machine, so they go to `.pants.rc`, which git ignores.

Exit codes: 0 all checks that could run passed; 1 a check failed; 3 Pants cannot be had on this machine.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv-pants"
RC = ROOT / ".pants.rc"
PEX = VENV / "pex.pex"
RC_MARK = "# Written by tools/pants_check.py for this machine; take this line out to keep your own settings.\n"

PANTS_VERSION = "2.17.1"
PEX_VERSION = "2.1.137"  # the version that this Pants calls
MODULES = {
    "collie_parallel": "collie_parallel",
    "collie_eval": "collie_eval",
    "collie_train": "collie_train",
    "collie_compat": "collie",
}

FAILED = 1
UNAVAILABLE = 3


def say(text: str) -> None:
    print(f"pants_check: {text}", flush=True)


def candidate_pythons() -> Iterator[str]:
    """Commands that may be a Python 3.9, `$PANTS_PYTHON` first."""
    if chosen := os.environ.get("PANTS_PYTHON"):
        yield chosen
    if on_path := shutil.which("python3.9"):
        yield on_path
    for home in (os.environ.get("PYENV_ROOT"), Path.home() / ".pyenv"):
        if home:
            yield from map(str, sorted(Path(home).glob("versions/3.9.*/bin/python3.9"), reverse=True))


def is_python39(command: str) -> bool:
    """Whether `command` starts and is a CPython 3.9 (a pyenv shim may be on PATH and not start)."""
    code = "import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, 9))"
    try:
        return subprocess.run([command, "-c", code], capture_output=True, timeout=60).returncode == 0
    except OSError:
        return False


def pip_of_pants(action: str) -> list[str]:
    """The words of a pip command in `.venv-pants`."""
    return [str(VENV / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", action, "--quiet"]


def installed_pants() -> str:
    """Version of Pants in `.venv-pants`, or an empty string."""
    python = VENV / "bin" / "python"
    if not python.exists():
        return ""
    code = "import importlib.metadata as m; print(m.version('pantsbuild.pants'))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60)
    return done.stdout.strip()


def install_pants() -> bool:
    """Make `.venv-pants`; False, with the reason printed, when that is not possible here."""
    if installed_pants() == PANTS_VERSION:
        return True
    python = next(filter(is_python39, candidate_pythons()), None)
    if python is None:
        say("no Python 3.9 found (on PATH, under pyenv, or named by PANTS_PYTHON), and Pants 2.17.1 runs on no other")
        return False
    say(f"installing Pants {PANTS_VERSION} into {VENV.name}")
    subprocess.run([python, "-m", "venv", "--clear", VENV], check=True)
    wanted = [f"pantsbuild.pants=={PANTS_VERSION}", f"pex=={PEX_VERSION}"]
    if subprocess.run([*pip_of_pants("install"), *wanted]).returncode != 0:
        say(f"pip found no {' or '.join(wanted)} for this Python 3.9 (its words are above)")
        return False
    return True


def build_pex_tool() -> bool:
    """Build the pex tool from its package; False, with the reason printed, when that is not possible here."""
    if PEX.exists():
        return True
    wheels, wanted = str(VENV / "wheels"), f"pex=={PEX_VERSION}"
    build = [str(VENV / "bin" / "pex"), wanted, "--no-pypi", "-f", wheels, "-c", "pex", "--no-strip-pex-env"]
    steps = (
        [*pip_of_pants("download"), "--no-deps", "-d", wheels, wanted],
        [*build, "--python-shebang", "/usr/bin/env python3", "-o", str(PEX)],
    )
    for step in steps:
        if subprocess.run(step).returncode != 0:
            say("the pex tool cannot be had here (the words of the step that failed are above)")
            return False
    return True


def write_settings(with_pex: bool) -> None:
    """Write this machine's settings to `.pants.rc`, unless someone keeps their own there."""
    if RC.exists() and not RC.read_text(encoding="utf-8").startswith(RC_MARK):
        say(".pants.rc is someone's own and stays as it is")
        return
    cache = ROOT / ".build" / "pants"
    lines = [
        "[GLOBAL]",
        f'local_store_dir = "{cache / "lmdb_store"}"',
        f'named_caches_dir = "{cache / "named_caches"}"',
    ]
    certificates = os.environ.get("SSL_CERT_FILE") or os.environ.get("PIP_CERT")
    if certificates and Path(certificates).is_file():
        lines.append(f'ca_certs_path = "{certificates}"')
    interpreter = Path(sys.base_prefix) / "bin"
    lines += ["[python-bootstrap]", f'search_path = ["{interpreter}", "<PATH>", "<PYENV>"]']
    if links := os.environ.get("PIP_FIND_LINKS", "").split():
        urls = [Path(link).absolute().as_uri() if Path(link).exists() else link for link in links]
        lines += ["[python-repos]", f"find_links = {urls}"]
    if with_pex:
        content = PEX.read_bytes()
        system = f"{'macos' if sys.platform == 'darwin' else 'linux'}_{_machine()}"
        known = f"v{PEX_VERSION}|{system}|{hashlib.sha256(content).hexdigest()}|{len(content)}"
        lines += ["[pex-cli]", f'version = "v{PEX_VERSION}"', f'known_versions = ["{known}"]']
        lines.append(f'url_template = "{PEX.as_uri()}"')
    RC.write_text(RC_MARK + "\n".join(lines) + "\n", encoding="utf-8")


def _machine() -> str:
    return {"aarch64": "arm64", "amd64": "x86_64"}.get(platform.machine().lower(), platform.machine().lower())


def pants(*arguments: str, show: bool = True) -> bool:
    """Run Pants in the checkout; whether it succeeded. What it prints is shown, or only if it failed."""
    say(f"pants {' '.join(arguments)}")
    environment = {**os.environ, "PATH": f"{VENV / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    command = [str(VENV / "bin" / "pants"), "--no-dynamic-ui", *arguments]
    started = time.monotonic()
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=900
    )
    if show or done.returncode != 0:
        print(done.stdout, end="")
        print(done.stderr, end="", file=sys.stderr)
    say(f"{'passed' if done.returncode == 0 else 'FAILED'} in {time.monotonic() - started:.1f} s")
    return done.returncode == 0


def end_daemon() -> None:
    """End the daemon that Pants leaves in this checkout, by its pid file, and wait until it has gone."""
    for path in (ROOT / ".pids").glob("*/pantsd/pid"):
        pid = int(path.read_text())
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
            for _ in range(100):
                os.kill(pid, 0)
                time.sleep(0.1)
            say(f"the daemon of Pants, process {pid}, has not ended after 10 s")


def check_wheels() -> bool:
    """Whether `dist/` holds one wheel of each package, with its code in it."""
    good = True
    for name, module in MODULES.items():
        found = sorted((ROOT / "dist").glob(f"{name}-*.whl"))
        files = zipfile.ZipFile(found[0]).namelist() if len(found) == 1 else []
        if f"{module}/__init__.py" not in files or f"{module}/py.typed" not in files:
            say(f"dist/ should hold one wheel of {name} with {module}/ in it; found {[path.name for path in found]}")
            good = False
    return good


def package() -> bool:
    """Package the four distributions afresh; whether all came out right."""
    for old in (ROOT / "dist").glob("collie_*"):
        old.unlink()
    return pants("package", "packages::", show=False) and check_wheels()


def main() -> int:
    if not install_pants():
        return UNAVAILABLE
    with_pex = build_pex_tool()
    write_settings(with_pex)
    try:
        checks = [pants("tailor", "--check", "::"), pants("dependencies", "::", show=False)]
        if with_pex:
            checks.append(package())
        else:
            say("the wheels were NOT packaged, for want of the pex tool; the graph checks need none")
    finally:
        end_daemon()
    return 0 if all(checks) else FAILED


if __name__ == "__main__":
    sys.exit(main())
