"""Install peers without root and outside the project's environment: wheels into a separate venv,
Debian packages unpacked into a directory. The sources are those of pip and apt; existing ones are kept."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.peers.peer import PeerMissing

FETCH_S = 300


def venv(home: Path, *packages: str) -> Path:
    """Return an interpreter that has the packages."""
    python = home / "venv" / "bin" / "python"
    wanted = "\n".join(packages)
    done = home / "venv" / "installed"
    if not (done.exists() and done.read_text() == wanted):
        home.mkdir(parents=True, exist_ok=True)
        run([sys.executable, "-m", "venv", "--clear", str(home / "venv")], f"no venv for {packages[0]}")
        pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check", "install", "--only-binary", ":all:"]
        run([*pip, *packages], f"pip cannot install {packages[0]}")
        done.write_text(wanted)
    return python


def debian(home: Path, program: str, package: str, *needed: str) -> Path:
    """Return a program of a Debian package, by its path inside, which may be a pattern; nothing is installed."""
    if not (found := next((home / "debian").glob(program), None)):
        if not (shutil.which("apt-get") and shutil.which("dpkg")):
            raise PeerMissing(f"{package} is not installed, and this is not Debian, so it cannot be downloaded")
        home.mkdir(parents=True, exist_ok=True)
        run(["apt-get", "download", package, *needed], f"apt-get cannot download {package}", cwd=home)
        for name in (*needed, package):
            archive = max(home.glob(f"{name}_*.deb"), key=os.path.getmtime)
            run(["dpkg", "-x", archive.name, "debian"], f"{archive.name} cannot be unpacked", cwd=home)
        found = next((home / "debian").glob(program), None)
    if found is None:
        raise PeerMissing(f"Debian's {package} does not contain {program}")
    return found


def package_versions(python: Path, *packages: str) -> str:
    show = f"from importlib.metadata import version as v; print(', '.join(f'{{p}} {{v(p)}}' for p in {packages!r}))"
    return run([str(python), "-c", show], "no versions").strip()


def run(command: list[str], trouble: str, cwd: Path | None = None) -> str:
    """Return the command's output; raise PeerMissing with its last error line."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_S, cwd=cwd, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PeerMissing(f"{trouble}: {type(error).__name__}") from None
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        raise PeerMissing(f"{trouble}: {said[-1].strip() if said else f'exit code {done.returncode}'}")
    return done.stdout
