"""The functions in C equal those in Python on valid, damaged and hostile input, and access only their own memory."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

import hatch_build
from heapline import accelerator
from heapline.accelerator import native, twins
from heapline.core.record import ROW
from heapline.journal import block, unit
from tests.unit import accelerator_calls

ROOT = Path(hatch_build.__file__).parent
built = pytest.mark.skipif(native is None, reason=f"the accelerator is off ({accelerator.reason})")
RECORDS = st.lists(st.tuples(st.binary(max_size=40), st.binary(max_size=600)), max_size=30)


@built
@pytest.mark.parametrize("name", ["crc32c", "crc32c_portable"])
def test_checksums_are_those_of_crc32c_for_every_length_and_alignment(name: str) -> None:
    data = np.random.default_rng(1).bytes(700)
    for start in range(9):
        for end in range(start, len(data), 1 if start == 0 else 37):
            assert getattr(native, name)(data[start:end]) == crc32c(data[start:end])
            assert getattr(native, name)(memoryview(data)[start:end]) == crc32c(data[start:end])


@built
@given(RECORDS, st.booleans(), st.integers(0, 1 << 30))
def test_both_versions_lay_out_the_same_block(records: Any, has_smalls: bool, seed: int) -> None:
    smalls = [small for small, _ in records] if has_smalls else None
    payloads = [payload for _, payload in records]
    raw = np.random.default_rng(seed).bytes(ROW.itemsize * len(records))
    ours, theirs = (np.frombuffer(bytearray(raw), ROW) for _ in range(2))
    assert native.lay_out(ours, smalls, payloads) == twins["lay_out"](theirs, smalls, payloads)
    assert ours.tobytes() == theirs.tobytes()


@built
@given(st.lists(RECORDS, min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_both_versions_cut_the_same_records(batches: Any, random: Any) -> None:
    blocks = []
    places = []
    for index, records in enumerate(batches):
        smalls, payloads = [small for small, _ in records], [payload for _, payload in records]
        blocks.append(twins["lay_out"](np.zeros(len(records), ROW), smalls, payloads)[0])
        places += [(index, 80 * row) for row in range(len(records))]
    random.shuffle(places)
    columns = np.array(places, np.int64).reshape(-1, 2).T.copy()
    found = native.cut_records(blocks, columns[0], columns[1])
    assert found == twins["cut_records"](blocks, columns[0], columns[1])
    assert found[1] == [batches[index][offset // 80][1] for index, offset in places]


@built
@given(st.lists(st.binary(max_size=1500), max_size=8))
def test_both_versions_make_the_same_sector_table(parts: list[bytes]) -> None:
    parts.append(bytes(-sum(map(len, parts)) % 512))
    sectors = sum(map(len, parts)) // 512
    assert native.sector_table(parts, sectors) == twins["sector_table"](parts, sectors)


@built
@given(st.lists(st.tuples(st.sampled_from(["grant", "end"]), st.integers(0, 3000), st.integers(1, 900)), max_size=25))
def test_both_lease_maps_keep_their_order_as_they_grow_and_shrink(steps: list[tuple[str, int, int]]) -> None:
    ours, theirs = native.LeaseMap(), twins["LeaseMap"]()
    for token, (name, first, count) in enumerate(steps):
        ids = list(range(first, first + count))
        for leases in (ours, theirs):
            if name == "grant":
                leases.grant(ids, 1000 * token, ids, ids, 50, 7, f"holder {token}")
            else:
                held = [id for id in leases if first <= id < first + count]
                assert leases.end(held)[0] == np.array(held, np.int64).tobytes()
        assert (list(ours), ours.values()) == (list(theirs), list(theirs.values()))
        assert [ours.get(id) for id in ids] == [theirs.get(id) for id in ids]


@built
@pytest.mark.parametrize("wrong", ["text", 1.0, True, None, 1 << 63])
def test_lease_map_grants_all_or_nothing(wrong: Any) -> None:
    for column in range(3):
        columns = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
        columns[column][2] = wrong
        leases = native.LeaseMap()
        with pytest.raises((TypeError, OverflowError)):
            leases.grant(columns[0], 0, columns[1], columns[2], 0, 0, "holder")
        assert list(leases) == []


@built
def test_lease_map_releases_its_holders() -> None:
    holder = "a holder without other references"
    before = sys.getrefcount(holder)
    leases = native.LeaseMap()
    leases.grant(list(range(500)), 0, [0] * 500, [0] * 500, 0, 0, holder)
    leases.grant(list(range(100)), 500, [0] * 100, [0] * 100, 0, 0, None)
    assert sys.getrefcount(holder) == before + 400
    assert leases.end(list(range(50, 200)))[1] == [(None, 50), (holder, 100)]
    with pytest.raises(KeyError):
        leases.end([200, 201, 201])
    assert sys.getrefcount(holder) == before + 298
    del leases
    assert sys.getrefcount(holder) == before


@built
def test_large_data_is_summed_without_the_gil_to_the_same_table() -> None:
    data = bytearray(np.random.default_rng(2).bytes(1 << 20))
    parts = [data[:100], memoryview(data)[100:700_001], bytes(data[700_001:])]
    assert native.sector_table(parts, 2048) == twins["sector_table"](parts, 2048)


@built
@settings(max_examples=1500)
@given(st.integers(0, 1 << 40))
def test_both_versions_agree_on_damaged_and_hostile_calls(seed: int) -> None:
    accelerator_calls.check(native, seed)


@pytest.mark.usefixtures("both_accelerators")
def test_block_over_4_gib_is_refused_before_it_is_allocated() -> None:
    part = bytes(64 << 20)
    for smalls, payloads in ((None, [part] * 64), ([part] * 40, [part] * 40)):
        rows = np.zeros(len(payloads), ROW)
        with pytest.raises(ValueError, match="smaller than 4 GiB"):
            block.make_block(rows, smalls, payloads)
        assert not rows.tobytes().strip(b"\0")


def test_hostile_calls_access_only_their_own_memory(tmp_path: Path) -> None:
    """AddressSanitizer and UndefinedBehaviorSanitizer end the process at the first access that is not allowed."""
    extension = tmp_path / "_accelerator.abi3.so"
    runtime = _sanitizer(tmp_path)
    flags = ("-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    hatch_build.compile_extension(ROOT / hatch_build.SOURCE, extension, *flags)
    environment = {
        **os.environ,
        "LD_PRELOAD": runtime,
        "ASAN_OPTIONS": "detect_leaks=0",  # the interpreter itself leaves objects behind
        "PYTHONMALLOC": "malloc",  # otherwise objects are parts of arenas, whose bounds the sanitizer does not know
    }
    command = [sys.executable, "-m", "tests.unit.accelerator_calls", str(extension), "4000"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "4000 calls\n"), done.stderr


def _sanitizer(directory: Path) -> str:
    """Return the path of the sanitizer's runtime. Skip the test if this machine cannot use one."""
    source, program = directory / "empty.c", directory / "empty"
    source.write_text("int main(void) { return 0; }\n")
    try:
        compiler = hatch_build._compiler()
        subprocess.run(
            [*compiler, "-fsanitize=address,undefined", str(source), "-o", str(program)],
            check=True, capture_output=True,
        )  # fmt: skip
        subprocess.run([str(program)], check=True, capture_output=True)
        found = subprocess.run([*compiler, "-print-file-name=libasan.so"], check=True, capture_output=True, text=True)
    except (hatch_build.NotBuilt, OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"this compiler has no sanitizers: {error}")
    if not os.path.isabs(found.stdout.strip()):
        pytest.skip("this compiler has no libasan.so to preload")
    return found.stdout.strip()


@pytest.mark.parametrize("content", ["", "not a program\n", None])
def test_missing_compiler_means_no_extension_and_a_successful_installation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None
) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text(content or "")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", 'cc "' if content is None else str(compiler))
    monkeypatch.delenv("HEAPLINE_ACCELERATOR", raising=False)
    with pytest.raises(hatch_build.NotBuilt):
        hatch_build.compile_extension(ROOT / hatch_build.SOURCE, tmp_path / "made.so")


# --- which version runs -----------------------------------------------------------------------------------------------


def test_variable_turns_the_accelerator_off() -> None:
    assert accelerator.load("off") == (None, "HEAPLINE_ACCELERATOR=off")
    assert accelerator.load("no") == (None, "HEAPLINE_ACCELERATOR=no")
    program = "from heapline.journal import block; print(block.lay_out.__module__, block.accelerated.__module__)"
    environment = {**os.environ, "HEAPLINE_ACCELERATOR": "off"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "heapline.journal.block heapline.accelerator\n"


def test_missing_extension_is_not_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "heapline._accelerator", None)
    module, reason = accelerator.load(None)
    assert module is None
    assert reason.startswith("not built")


def test_extension_of_another_version_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    other = SimpleNamespace(VERSION=accelerator.VERSION + 1, CHECKSUMS="portable")
    monkeypatch.setitem(sys.modules, "heapline._accelerator", other)  # type: ignore[arg-type]
    assert accelerator.load(None) == (None, "built from another version of Heapline; install this one again")


@built
@pytest.mark.usefixtures("both_accelerators")
def test_every_module_that_imports_a_function_gets_the_same_version(request: pytest.FixtureRequest) -> None:
    is_on = request.node.callspec.params["both_accelerators"] == "on"
    for name, twin in twins.items():
        expected = getattr(native, name) if is_on else twin
        assert getattr(sys.modules[twin.__module__], name) is expected
    assert unit.sector_table is (native.sector_table if is_on else twins["sector_table"])


def test_accelerator_stays_small_and_uses_only_the_stable_abi() -> None:
    source = (ROOT / hatch_build.SOURCE).read_text(encoding="utf-8")
    assert "#define Py_LIMITED_API 0x030B0000" in source
    assert len(source.splitlines()) < 800


# --- builds -----------------------------------------------------------------------------------------------------------


def tree(directory: Path, source: str) -> Path:
    """A checkout that has only the C source, and an extension from an earlier build."""
    package = (directory / hatch_build.SOURCE).parent
    package.mkdir(parents=True)
    (directory / hatch_build.SOURCE).write_text(source)
    (directory / hatch_build.EXTENSION).write_text("old")
    return directory


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"CC": "no-such-compiler"}, r"no C compiler found \(no-such-compiler\)"),
        ({"CC": "false"}, "false failed: exit code 1"),
        ({"HEAPLINE_ACCELERATOR": "off"}, "HEAPLINE_ACCELERATOR is off"),
    ],
)
def test_failed_build_says_why_and_leaves_no_old_extension(
    variables: dict[str, str], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tree(tmp_path, (ROOT / hatch_build.SOURCE).read_text(encoding="utf-8"))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(hatch_build.NotBuilt, match=reason):
        hatch_build.compile_accelerator(root)
    assert [path.name for path in (root / hatch_build.SOURCE).parent.iterdir()] == ["_accelerator.c"]


def test_build_without_python_headers_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hatch_build.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    monkeypatch.setenv("CC", "true")
    with pytest.raises(hatch_build.NotBuilt, match="Python's headers are not installed"):
        hatch_build.compile_extension(ROOT / hatch_build.SOURCE, tmp_path / "extension.so")


@built
def test_extension_that_cannot_be_loaded_is_not_kept(tmp_path: Path) -> None:
    root = tree(tmp_path, "int unrelated(void) { return 0; }\n")
    with pytest.raises(hatch_build.NotBuilt, match="PyInit__accelerator"):
        hatch_build.compile_accelerator(root)
    assert not (root / hatch_build.EXTENSION).exists()


@pytest.mark.parametrize(
    ("platform", "machine", "tag"),
    [
        ("linux-x86_64", "x86_64", "cp311-abi3-linux_x86_64"),
        ("macosx-11.0-arm64", "arm64", "cp311-abi3-macosx_11_0_arm64"),
        ("macosx-10.9-universal2", "x86_64", "cp311-abi3-macosx_10_9_x86_64"),
    ],
)
def test_wheel_names_the_processor_that_it_was_compiled_for(
    platform: str, machine: str, tag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hatch_build.sysconfig, "get_platform", lambda: platform)
    monkeypatch.setattr(hatch_build.platform, "machine", lambda: machine)
    assert hatch_build.wheel_tag() == tag


def test_make_test_runs_the_cores_tests_without_the_accelerator() -> None:
    _, _, recipe = (ROOT / "Makefile").read_text(encoding="utf-8").partition("\ntest: lint ")
    start = f"\t{accelerator.VARIABLE}=off $(PYTEST) "
    (line,) = [line for line in recipe.partition("\n\n")[0].splitlines() if line.startswith(start)]
    for folder in ("core", "journal", "engine"):
        assert f" tests/unit/{folder} " in line


def test_running_the_build_hook_compiles_descriptors_too(tmp_path: Path) -> None:
    root = tree(tmp_path, "")
    shutil.copy(hatch_build.__file__, root)
    shutil.copytree(ROOT / "proto", root / "proto")
    (root / hatch_build.DESCRIPTORS).parent.mkdir(parents=True)
    ran = subprocess.run(
        [sys.executable, "hatch_build.py"],
        cwd=root,
        env={**os.environ, "HEAPLINE_ACCELERATOR": "off", "HEAPLINE_FRONT_END": "off"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (1, "accelerator not built: HEAPLINE_ACCELERATOR is off\n")
    assert b"heapline.v1" in (root / hatch_build.DESCRIPTORS).read_bytes()
