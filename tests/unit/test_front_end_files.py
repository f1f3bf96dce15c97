"""The build gets the dashboard's third-party files by their pins, or says what is missing."""

from __future__ import annotations

import base64
import hashlib
import io
import re
import shutil
import tarfile
import tomllib
from pathlib import Path

import pytest

import hatch_build

ROOT = Path(hatch_build.__file__).parent
PACKAGE = "left-pad-of-the-test"


def tarball(**files: str) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(f"package/{name}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    return out.getvalue()


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree with one pinned package, which a program in place of npm packs."""
    data = tarball(**{"a.js": "alert", "icons/x.svg": "<!-- c --><svg\n a='1'>\n <path/>\n</svg>"})
    (tmp_path / "packed.tgz").write_bytes(data)
    npm = tmp_path / "npm"
    pack = f'cp {tmp_path}/packed.tgz "$2"/{PACKAGE}-1.0.tgz'
    npm.write_text(f'#!/bin/sh\nwhile [ "$1" != --pack-destination ]; do shift; done\n{pack}\n')
    npm.chmod(0o755)
    monkeypatch.setattr(hatch_build, "_npm", lambda: [str(npm)])
    sha512 = base64.b64encode(hashlib.sha512(data).digest()).decode()
    (tmp_path / hatch_build.PINS).parent.mkdir(parents=True)
    (tmp_path / hatch_build.PINS).write_text(
        f'[[package]]\nname = "{PACKAGE}"\nversion = "1.0"\nsha512 = "{sha512}"\n'
        'files = { "a.js" = "b.js" }\nicons = ["x"]\n'
    )
    return tmp_path


def test_pinned_files_are_copied_and_icons_joined(tree: Path) -> None:
    assert not hatch_build.has_front_end(tree)
    hatch_build.fetch_front_end(tree)
    vendor = tree / hatch_build.VENDOR
    assert (vendor / "b.js").read_text() == "alert"
    assert '<symbol id="x" viewBox="0 0 24 24"><path/></symbol>' in (vendor / "icons.svg").read_text()
    assert hatch_build.has_front_end(tree)


def test_tarball_with_another_sha512_is_refused_and_old_files_stay(tree: Path) -> None:
    hatch_build.fetch_front_end(tree)
    (tree / "packed.tgz").write_bytes(tarball(**{"a.js": "evil", "icons/x.svg": "<svg></svg>"}))
    with pytest.raises(hatch_build.NotBuilt, match=f"sha512 of {PACKAGE}"):
        hatch_build.fetch_front_end(tree)
    assert (tree / hatch_build.VENDOR / "b.js").read_text() == "alert"


def test_changed_pins_make_old_files_outdated(tree: Path) -> None:
    hatch_build.fetch_front_end(tree)
    pins = tree / hatch_build.PINS
    pins.write_text(pins.read_text() + "\n")
    assert not hatch_build.has_front_end(tree)


def test_unreachable_registry_is_reported_in_one_line(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tree / "npm").write_text("#!/bin/sh\necho 'npm error network' >&2\nexit 1\n")
    with pytest.raises(hatch_build.NotBuilt, match="npm error network"):
        hatch_build.fetch_front_end(tree)


def test_front_end_can_be_left_out_of_a_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEAPLINE_FRONT_END", "off")
    with pytest.raises(hatch_build.NotBuilt, match="HEAPLINE_FRONT_END is off"):
        hatch_build.fetch_front_end(ROOT)


def test_pins_name_no_host() -> None:
    text = (ROOT / hatch_build.PINS).read_text()
    assert not re.search(r"https?:|registry\.", text)
    for package in tomllib.loads(text)["package"]:
        assert len(base64.b64decode(package["sha512"])) == 64


@pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")
def test_checkout_has_the_files_of_its_pins() -> None:
    if not hatch_build.has_front_end(ROOT):
        pytest.skip("the registry could not be reached when this checkout was installed")
    for package in tomllib.loads((ROOT / hatch_build.PINS).read_text())["package"]:
        for name in package["files"].values():
            assert (ROOT / hatch_build.VENDOR / name).stat().st_size > 0
