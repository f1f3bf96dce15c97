"""Every figure next to its baseline, measured in the same run: `python -m benchmarks core --quick`.

A benchmark is a module here with a generator `run(quick: bool)`, or `run(quick: bool, directory: Path)` if it needs a
real disk; the directory is empty and removed afterwards. One that also takes `scale: float` can run on a share of its
sizes. It yields one dict per figure:

    name      what was measured, unique in its suite
    value     the figure, in `unit`
    baseline  the compared figure, from the same run in the same unit; None if there is none
    ratio     how ours compares with the baseline; None without one
    target    the goal, as people write it: "≥ 10×", "≤ 40 bytes"; None if only reported
    met       whether it was; None if there is no target
    better    optional, "higher" or "lower": which way the ratio improves. Without it higher, unless the target bounds
              the ratio from above: "≤ 1.5×"
    error     optional: why there is no figure; `value` is None then
    about     optional, if the baseline is another product: its `peer`, `version` and `durability`

Between them it may yield a `harness.Step`, which moves the progress bar.

Machines differ and are shared, so runs are compared by ratios (`ratios.json`), never by figures.
"""
