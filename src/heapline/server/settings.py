"""Settings of `heapline serve`: flags override the environment (HEAPLINE_…), which overrides a YAML file.

Settings of a topic are stored with the topic; these belong to one process.
"""

from __future__ import annotations

import os
from dataclasses import fields
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Literal, get_origin, get_type_hints

import msgspec
import yaml
from msgspec import Meta

from heapline.contract.config import BrokerConfig, make_broker_config
from heapline.contract.errors import BadRequest
from heapline.server.auth.tls import TlsFiles
from heapline.server.limits import Limits, MQueueRules

# Calls that arrive together share turns and commits. Three interleaved rounds on a busy machine gave 16.1 k messages/s
# without gathering, 17.5 k with 4 steps, 19.7 k with 12; the gain is not settled.
GATHER_STEPS = 4
PREFIX = "HEAPLINE_"
SQL_SETTINGS = ("postgres", "redis", "durability", "slow_mode")
Port = Annotated[int, Meta(ge=0, le=65535)]
Positive = Annotated[int, Meta(ge=1)]
Rate = Annotated[float, Meta(ge=0, le=1e6)]


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    broker_type: Literal["log", "sql"] = "log"  # a directory of this machine, or PostgreSQL databases
    postgres: list[str] = []  # sql only: one URL per shard, always in the same order
    redis: str | None = None  # sql only: URL of a Redis database that all nodes share
    durability: Literal["wal", "redis", "postgres"] | None = None  # sql only: see SqlConfig; None: wal, in data/wal
    slow_mode: bool = False  # sql only: with durability redis, enqueue into Postgres while Redis is down
    data: Path = Path("data")  # the log broker's directory; keys and the audit log
    host: str = "127.0.0.1"  # loopback by default
    port: Port = 7400  # of the native wire; 0: any free port
    grpc_port: Port = 7410
    http_port: Port = 7480
    http_prefix: Annotated[str, Meta(pattern=r"^(/[A-Za-z0-9._~-]+)*$")] = ""  # path under which a proxy serves HTTP
    dashboard: bool = True  # serve pages for people under /ui/
    read_only: bool = False  # the dashboard changes nothing; other interfaces are not affected
    unix_socket: Path | None = None  # the native wire on a socket that only this user can open
    stop_grace: Annotated[float, Meta(ge=0, le=3600)] = 10.0  # seconds for calls in flight when it stops
    request_bytes_max: Annotated[int, Meta(ge=1 << 20, le=1 << 30)] = 64 << 20  # of one request
    streams_per_connection_max: Annotated[int, Meta(ge=1, le=1 << 20)] = 10_000  # gRPC calls on one connection
    streams_per_key: Positive = Limits.streams_per_key  # these six: see limits.py
    inflight_per_key: Positive = Limits.inflight_per_key
    leases_per_consumer: Positive = Limits.leases_per_consumer
    payload_bytes_max: Positive = Limits.payload_bytes_max
    calls_per_second: Rate = Limits.calls_per_second
    messages_per_second: Rate = Limits.messages_per_second
    mqueue_creates_topics: bool = True  # these six: see MQueueRules there
    mqueue_topics_per_namespace_max: Annotated[int, Meta(ge=0, le=1 << 20)] = 100
    mqueue_topics_max: Annotated[int, Meta(ge=0, le=1 << 20)] = 1000
    mqueue_rate: Rate = 0.0
    mqueue_rates: dict[str, Rate] = {}
    mqueue_burst: Annotated[float, Meta(ge=0, le=3600)] = 1.0
    # gRPC only: seconds of silence until a client must show that it is alive. One that does not loses its streams and
    # waiting pops; otherwise they would continue to lease messages that no client receives.
    grpc_keepalive: Annotated[float, Meta(ge=0.1, le=7200)] = 30.0
    token_lifetime: Annotated[float, Meta(ge=60, le=7 * 86400)] = 900.0  # seconds that a login's token is valid
    session_lifetime: Annotated[float, Meta(ge=60, le=30 * 86400)] = 43200.0  # seconds, of a browser's session
    broker: dict[str, Any] = {}  # fields of BrokerConfig (log) or SqlConfig (sql), by name
    tls_certificate: Path | None = None  # PEM, with intermediates; None: no TLS, on loopback only
    tls_key: Path | None = None  # its private key, mode 0600
    tls_client_ca: Path | None = None  # authorities of client certificates (mTLS); None: none is required
    plaintext: bool = False  # no TLS beyond loopback either: keys and messages can be read on the way
    metrics_public: bool | None = None  # /metrics without a key; None: only if the host is loopback
    otlp_endpoint: str | None = None  # where traces are sent; OTEL_EXPORTER_OTLP_ENDPOINT works too. None: nowhere
    trace_sample: Annotated[float, Meta(ge=0, le=1)] = 0.01  # of the calls whose caller has not decided
    log_format: Literal["text", "json"] | None = None  # None: text on a terminal, JSON otherwise
    insecure_everybody: bool = False  # no authentication: every caller is administrator. For testing on loopback.

    def __repr__(self) -> str:  # without URLs, which may contain passwords
        return f"ServerSettings(broker_type={self.broker_type!r}, data={str(self.data)!r}, host={self.host!r})"

    @property
    def on_loopback(self) -> bool:
        return is_loopback(self.host)

    def broker_config(self) -> BrokerConfig:
        return make_broker_config({"gather_steps": GATHER_STEPS, "series": True} | self.broker)

    @property
    def token_ms(self) -> int:
        return round(self.token_lifetime * 1000)

    @property
    def session_ms(self) -> int:
        return round(self.session_lifetime * 1000)

    def limits(self) -> Limits:
        return Limits(**{f.name: getattr(self, f.name) for f in fields(Limits)})

    def tls_files(self) -> TlsFiles | None:
        if self.tls_certificate is None or self.tls_key is None:
            return None
        return TlsFiles(certificate=self.tls_certificate, key=self.tls_key, client_ca=self.tls_client_ca)

    def mqueue_rules(self) -> MQueueRules:
        return MQueueRules(**{f.name: getattr(self, f"mqueue_{f.name}") for f in fields(MQueueRules)})


def read_settings(file: Path | None = None, **flags: Any) -> ServerSettings:
    """Join all sources. Flags that are None were not given."""
    try:
        from_file = {} if file is None else yaml.safe_load(file.read_text()) or {}
        if not isinstance(from_file, dict):
            raise BadRequest(f"{file} must contain names and values")
        given = {name: value for name, value in flags.items() if value is not None}
        usual = {"otlp_endpoint": os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or None}
        settings = _convert(usual | from_file | _from_environment() | given)
    except yaml.YAMLError as error:
        raise BadRequest(f"{file} is not valid YAML{_place(error)}") from None
    except (msgspec.ValidationError, msgspec.DecodeError, OSError, TypeError) as error:
        raise BadRequest(f"invalid server settings: {_explained(error)}") from None
    _check_exposure(settings)
    _check_broker(settings)
    settings.mqueue_rules().validate()
    return settings


def _explained(error: Exception) -> str:
    """Return the error's text, beginning with the name of the setting where msgspec appends a path to it."""
    text, _, path = str(error).partition(" - at `$.")
    return f"{path.rstrip('`')}: {text[0].lower()}{text[1:]}" if path else text


def _place(error: yaml.YAMLError) -> str:
    """Return where the error is. Its own text quotes the file, which may contain passwords."""
    mark = getattr(error, "problem_mark", None)
    return "" if mark is None else f"; see line {mark.line + 1}, column {mark.column + 1}"


def _from_environment() -> dict[str, Any]:
    """Return the settings that environment variables give: mappings as JSON, lists separated by spaces."""
    found: dict[str, Any] = {}
    for name, hint in get_type_hints(ServerSettings).items():
        text = os.environ.get(f"{PREFIX}{name.upper()}")
        if text is not None:
            kind = get_origin(hint)
            value = msgspec.json.decode(text) if kind is dict else text.split() if kind is list else text
            found[name] = getattr(_convert({name: value}, strict=False), name)
    return found


def _convert(values: dict[str, Any], strict: bool = True) -> ServerSettings:
    return msgspec.convert(values, ServerSettings, strict=strict, dec_hook=_decode)


def _decode(kind: type[Any], value: Any) -> Any:
    if kind is Path and isinstance(value, str | Path):
        return Path(value)
    raise TypeError(f"{value!r} is not a path")


def _check_broker(settings: ServerSettings) -> None:
    """Check that the settings belong to the chosen broker. Those of `sql` are checked where it is created."""
    if settings.broker_type == "log":
        for name in SQL_SETTINGS:
            if getattr(settings, name):
                raise BadRequest(f"{name} is a setting of the sql broker; add --broker sql, or omit it")
        settings.broker_config()
    elif not settings.postgres:
        raise BadRequest("the sql broker needs a database; give --postgres URL for each shard, in the same order")


def _check_exposure(settings: ServerSettings) -> None:
    """Check who can reach the ports, and whether others can read what is sent."""
    if (settings.tls_certificate is None) != (settings.tls_key is None):
        raise BadRequest("tls_certificate and tls_key belong together; give both or neither")
    if settings.tls_client_ca is not None and settings.tls_certificate is None:
        raise BadRequest("tls_client_ca needs TLS; give tls_certificate and tls_key too")
    if is_loopback(settings.host):
        return
    if settings.insecure_everybody:
        raise BadRequest(f"insecure_everybody is for loopback only, not for host={settings.host!r}")
    if settings.tls_certificate is None and not settings.plaintext:
        raise BadRequest(
            f"others can reach host={settings.host!r}, and without TLS they can read every key and message; give "
            "--tls-certificate and --tls-key (`heapline certs dev DIR` creates a set for testing), or --plaintext if "
            "something else encrypts the connection"
        )


def is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
