"""`manage.py heapline_relay`: enqueue committed rows until a signal stops it."""

from __future__ import annotations

import asyncio
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.db import DEFAULT_DB_ALIAS

from heapline.contract.errors import HeaplineError
from heapline.outbox.django.store import DjangoStore
from heapline.outbox.relay import serve


class Command(BaseCommand):
    help = "Bring messages of committed transactions to a Heapline broker."

    def add_arguments(self, parser: Any) -> None:
        parser.add_argument("--to", help="the server, host:port; or HEAPLINE_URL, or localhost:7400")
        parser.add_argument("--data", help="a data directory of this machine, instead of a server")
        parser.add_argument("--key-file", help="a file with the API key; or HEAPLINE_API_KEY_FILE")
        parser.add_argument("--using", default=DEFAULT_DB_ALIAS, help="which of the project's databases")
        parser.add_argument("--once", action="store_true", help="relay the rows that are committed now, then exit")

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            relayed = asyncio.run(
                serve(
                    DjangoStore(options["using"]),
                    to=options["to"],
                    data=options["data"],
                    key_file=options["key_file"],
                    once=options["once"],
                )
            )
        except HeaplineError as error:
            raise CommandError(f"{type(error).__name__}: {error}") from error
        self.stdout.write(f"{relayed} message{'' if relayed == 1 else 's'} relayed")
