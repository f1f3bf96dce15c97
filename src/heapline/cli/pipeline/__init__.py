"""`heapline pipeline JOB …`: the group of jobs."""

from __future__ import annotations

from typing import Any

from heapline.cli.main import CommandGroup, Group
from heapline.cli.pipeline import lake, replay, report
from heapline.cli.pipeline.job import short_error


class Jobs(Group):
    """A group whose errors of Spark are shown as one line."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Exception as error:
            if (shown := short_error(error)) is None:
                raise
            raise shown from None


app = CommandGroup(
    "pipeline",
    example="pipeline audit --path data --topic jobs",
    more=r"Needs `pip install 'heapline\[spark-local]'`, or Spark 4.2 or newer with `heapline\[spark,lake]`.",
    cls=Jobs,
)
app.add_typer(lake.lake_app, name="lake")
for command in (
    lake.archive, lake.lifecycles, report.audit, replay.load, replay.replay, report.report, report.rebuild,
    report.forecast, lake.forget,
):  # fmt: skip
    app.command(command.__name__)(command)
