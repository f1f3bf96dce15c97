"""`heapline pipeline JOB …`: which jobs there are, and nothing of what they do.

Each job's command is a module of its own beside this one, imported when it is asked for, with either a typer app called
`app` or a function called as the job. What a job does is in heapline.spark.jobs, as functions that take a session.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import Any

import typer
from typer.core import TyperGroup

from heapline.cli.main import command_of
from heapline.cli.pipeline.failing import told

#: In the order in which they are of use. A job's module is `heapline.cli.pipeline.<name>`.
JOBS = ("archive", "lake", "lifecycles", "audit", "load", "replay", "report", "rebuild", "forecast", "forget")


class Jobs(TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        return [name for name in JOBS if find_spec(f"heapline.cli.pipeline.{name}")]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.list_commands(ctx):
            return None
        return command_of(importlib.import_module(f"heapline.cli.pipeline.{cmd_name}"), cmd_name)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Exception as error:
            if (shown := told(error)) is None:
                raise
            raise shown from None


app = typer.Typer(
    cls=Jobs,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="rich",
    help=r"""The queue as data: jobs that Spark runs, on this machine or on a cluster (--master).

    Needs `pip install 'heapline\[spark-local]'`, or a Spark of 4.2 or newer with `heapline\[spark,lake]`.

    Example:  [cyan]heapline pipeline audit --path data --topic jobs[/cyan]
    """,
)


@app.callback()
def _pipeline() -> None:
    """Nothing is shared by all jobs but what sharing.py adds to each."""


__all__ = ["JOBS", "app"]
