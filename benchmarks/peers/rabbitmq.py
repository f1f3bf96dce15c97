"""A quorum queue on RabbitMQ, from Debian's packages, which are unpacked and not installed.

Debian's RabbitMQ is 3.10; quorum queues have had priorities since 4.0 only. Priorities are sent and ignored.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from benchmarks.peers import install
from benchmarks.peers.peer import Running
from benchmarks.server.spawned import answers, child, free_port, wait_for

ERLANG = (
    "erlang-asn1", "erlang-base", "erlang-crypto", "erlang-eldap", "erlang-ftp", "erlang-inets", "erlang-mnesia",
    "erlang-os-mon", "erlang-parsetools", "erlang-public-key", "erlang-runtime-tools", "erlang-snmp", "erlang-ssl",
    "erlang-syntax-tools", "erlang-tftp", "erlang-tools", "erlang-xmerl",
)  # fmt: skip
ROOTDIR = "ROOTDIR=/usr/lib/erlang"


class RabbitMQ:
    driver: ClassVar[str] = "rabbitmq"
    durability: ClassVar[str] = (
        "publish: quorum queue of one node, log with an fsync before the confirm; deliveries and acks: in the same "
        "log, acks are not confirmed; no priorities in this version"
    )

    def __init__(self, home: Path) -> None:
        self._home = home
        self._python = Path()
        self._server = Path()
        self._erlang = Path()

    def install(self) -> None:
        pattern = "usr/lib/rabbitmq/lib/rabbitmq_server-*/sbin/rabbitmq-server"
        self._server = install.debian(self._home, pattern, "rabbitmq-server", *ERLANG).absolute()
        self._erlang = (self._home / "debian/usr/lib/erlang").absolute()
        script = self._erlang / "bin" / "erl"
        script.write_text(script.read_text().replace(f"{ROOTDIR}\n", f"ROOTDIR={self._erlang}\n"))
        self._python = install.venv(self._home, "aio-pika", "uvloop")

    @property
    def version(self) -> str:
        number = self._server.parts[-3].rpartition("-")[2]
        return f"RabbitMQ {number}; {install.package_versions(self._python, 'aio-pika')}"

    @contextlib.contextmanager
    def start(self, directory: Path) -> Iterator[Running]:
        port, names_port, said = free_port(), free_port(), directory / "log"
        base = directory.absolute()
        (base / "rabbitmq.conf").write_text(f"listeners.tcp.1 = 127.0.0.1:{port}\nlog.console = true\n")
        (base / "plugins").write_text("[].\n")
        settings = {
            "CONFIG_FILE": "rabbitmq.conf", "ENABLED_PLUGINS_FILE": "plugins",
            "MNESIA_BASE": "data", "LOG_BASE": "logs", "PID_FILE": "pid", "FEATURE_FLAGS_FILE": "flags",
            "CONF_ENV_FILE": "no-file",
        }  # fmt: skip
        environment = {f"RABBITMQ_{name}": str(base / value) for name, value in settings.items()}
        environment |= {
            "RABBITMQ_HOME": str(self._server.parents[1]), "RABBITMQ_NODENAME": f"bench{port}@localhost",
            "RABBITMQ_DIST_PORT": str(free_port()), "ERL_EPMD_PORT": str(names_port), "HOME": str(base),
            "PATH": f"{self._erlang / 'bin'}:{os.environ['PATH']}",
        }  # fmt: skip
        environment = {**os.environ, **environment}
        epmd = [str(self._erlang / "bin" / "epmd"), "-address", "127.0.0.1", "-port", str(names_port)]
        with said.open("w") as log, child(epmd, log, env=environment) as names:
            wait_for(names, said, lambda: answers(names_port))  # otherwise RabbitMQ starts one that outlives it
            with child([str(self._server)], log, env=environment) as process:
                wait_for(process, said, lambda: "Server startup complete" in said.read_text())
                yield Running(process.pid, port, str(self._python))
