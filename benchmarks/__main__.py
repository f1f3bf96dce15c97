"""`python -m benchmarks SUITE`: which modules run, and the form of their results."""

from __future__ import annotations

import argparse
import sys
import time

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from benchmarks import bars, harness, ratios, report
from benchmarks.harness import Row, Step
from benchmarks.sdk import targets as sdk
from benchmarks.server import targets as server
from benchmarks.sql import targets as sql

REPORT = "report"
#: The suites that run next to other products, and these products.
PEERS: dict[str, tuple[str, ...]] = {"server": tuple(server.PEERS), "sdk": tuple(sdk.PEERS), "sql": tuple(sql.PEERS)}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure Heapline next to its baselines.")
    parser.add_argument(
        "suite", choices=[*sorted(harness.SUITES), REPORT],
        help=f"which benchmarks to run; `{REPORT}` draws the tables of docs/benchmarks.md next to peers as SVG files",
    )  # fmt: skip
    parser.add_argument(
        "--quick",
        action="store_true",
        help="smaller sizes: a suite in under 45 s, `server` and `sdk` with all peers in three minutes",
    )
    parser.add_argument(
        "--only", action="append", metavar="NAME", help="only this module of the suite; can be repeated"
    )
    parser.add_argument(
        "--peers", type=_names, metavar="NAMES",
        help="which other products run next to ours, separated by commas (default: all); \"\" for none. "
        + "; ".join(f"`{suite}`: {', '.join(names)}" for suite, names in PEERS.items()),
    )  # fmt: skip
    parser.add_argument(
        "--scale", type=float, default=1.0, metavar="SHARE",
        help="`streams`: this share of the sizes and of the targets that depend on them (1); ratios are not saved",
    )  # fmt: skip
    parser.add_argument(
        "--seconds", type=float, metavar="N",
        help=f"`sql`: how long a transaction is held open ({sql.HELD_SECONDS:g}; --quick: {sql.HELD_SECONDS_QUICK:g})",
    )  # fmt: skip
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--json", action="store_true", help="one object per line: " + ", ".join(report.JSON_KEYS))
    shape.add_argument(
        "--markdown", action="store_true", help="a table for docs/benchmarks.md, with the machine's facts"
    )
    parser.add_argument("--save", action="store_true", help="save this run's ratios in benchmarks/ratios.json")
    parser.add_argument(
        "--check", action="store_true", help="exit with 1 if a ratio regressed or is missing, or a module failed",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    if not 0 < options.scale <= 1:
        parser.error("--scale is a share: over 0, at most 1")
    if options.seconds is not None and (options.suite != "sql" or options.seconds < 4):
        parser.error("--seconds is for `sql`: at least 4")
    if options.save and options.scale != 1:
        parser.error("--save saves the ratios of the full sizes; omit --scale")
    known = [harness.short_name(module) for module in harness.SUITES.get(options.suite, ())]
    unknown = set(options.only or ()) - set(known)
    if unknown:
        parser.error(f"{options.suite} has no {', '.join(sorted(unknown))}; it has {', '.join(known)}")
    there = PEERS.get(options.suite, ())
    options.peers = there if options.peers is None else options.peers
    if strangers := set(options.peers) - set(there):
        parser.error(f"{options.suite} has no peer {', '.join(sorted(strangers))}; it has {', '.join(there) or 'none'}")
    return options


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def run(options: argparse.Namespace, console: Console) -> list[Row]:
    """Run the modules one after another, showing which on the console; JSON lines are written as they arrive."""
    rows = []
    modules = [m for m in harness.SUITES[options.suite] if not options.only or harness.short_name(m) in options.only]
    with progress_bar(console) as progress:
        bar = progress.add_task("", total=len(modules))
        for number, module in enumerate(modules):
            short = harness.short_name(module)
            progress.update(bar, completed=number, description=f"{short} …")

            def advance(step: Step, number: int = number, short: str = short) -> None:
                done = number + step.done / max(step.total, 1)
                progress.update(bar, completed=done, description=f"{short} … {step.text}")

            given = {"quick": options.quick, "peers": options.peers, "scale": options.scale}
            given["seconds"] = options.seconds
            for row in harness.run_module(module, **given, on_step=advance):
                rows.append(row)
                shown = f"{short} … {row.name}: {report.figure(row.value, row.unit)}"
                progress.update(bar, description=shown)
                if row.error:
                    tell(console, f"error: {row.error}")
                if options.json:
                    print(report.json_line(row), flush=True)
    return rows


def progress_bar(console: Console) -> Progress:
    """A progress bar that disappears at the end, when the table is shown."""
    text = TextColumn("{task.description}", markup=False)
    return Progress(SpinnerColumn(), BarColumn(24), TimeElapsedColumn(), text, console=console, transient=True)


def tell(console: Console, trouble: str) -> None:
    console.print(trouble, style="red", markup=False, highlight=False, soft_wrap=True)


def main() -> int:
    options = parse()
    console = Console(stderr=True)
    if options.suite == REPORT:
        for path in bars.draw():
            console.print(f"drew {path.relative_to(bars.DOCS.parent)}", highlight=False)
        return 0
    began = time.monotonic()
    key = ratios.key_of(options.suite, options.quick)
    kept = ratios.load(key)
    if options.check and not kept:
        tell(console, f"no ratios of {key} are saved, so nothing can be checked; save some with --save")
        return 1
    rows = run(options, console)
    if options.markdown:
        command = f"`python -m benchmarks {options.suite}{' --quick' if options.quick else ''}`"
        print(report.markdown(rows, kept, command))
    elif not options.json:
        report.print_table(rows, kept, Console())
        report.print_peers(rows, Console())
    regressed = [row for row in rows if ratios.regressed_from(row, kept) is not None]
    for row in regressed:
        tell(console, f"regression: {row.name} is at {row.ratio:.3g}×, was {kept[row.name]:.3g}×")
    unchecked, left_out = [], set(PEERS.get(options.suite, ())) - set(options.peers)
    failed = any(row.error for row in rows)
    if options.save:
        ratios.save(key, rows, is_whole=not (options.only or left_out or failed))
    elif options.check:
        unchecked = [f"no ratio of {name} is saved; save one with --save" for name in ratios.unguarded(rows, kept)]
        if not options.only:
            unchecked += [f"this run has no ratio of {name}" for name in ratios.absent(rows, kept, left_out)]
        for reason in unchecked:
            tell(console, f"not checked: {reason}")
    console.print(f"{len(rows)} figures in {time.monotonic() - began:.0f} s", style="dim")
    return int(options.check and bool(regressed or unchecked or failed))


if __name__ == "__main__":
    sys.exit(main())
