"""Settings of `heapline serve`: flags over environment (HEAPLINE_…) over a YAML file over defaults.

What a topic is set to is stored with the topic; this is one process's own affair.
"""

from __future__ import annotations

import os
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from heapline.config import BrokerConfig, make_broker_config
from heapline.errors import BadRequest
from heapline.server.auth.limits import Limits
from heapline.server.auth.tls import TlsFiles
from heapline.server.mqueue_rules import MQueueRules

# A server's calls come one by one; let gather, they share turns and commits. What it gains is not settled: three
# interleaved rounds on a busy machine gave 16.1 k messages/s without, 17.5 k with 4 steps, 19.7 k with 12.
GATHER_STEPS = 4


Rate = Annotated[float, Field(ge=0, le=1e6)]


class ServerSettings(BaseSettings):
    model_config = SettingsConfigDict(env_prefix="HEAPLINE_", extra="forbid", frozen=True)

    data: Path = Path("data")  # the directory of the broker
    host: str = "127.0.0.1"  # loopback, unless somebody means more
    grpc_port: Annotated[int, Field(ge=0, le=65535)] = 7400  # 0: any that is free
    http_port: Annotated[int, Field(ge=0, le=65535)] = 7480
    stop_grace: Annotated[float, Field(ge=0, le=3600)] = 10.0  # seconds for calls under way when it stops
    request_bytes_max: Annotated[int, Field(ge=1 << 20, le=1 << 30)] = 64 << 20  # gRPC itself refuses larger requests
    streams_per_connection_max: Annotated[int, Field(ge=1, le=1 << 20)] = 10_000  # calls under way on one connection
    streams_per_key: Annotated[int, Field(ge=1)] = Limits.streams_per_key  # these four: see server/auth/limits.py
    inflight_per_key: Annotated[int, Field(ge=1)] = Limits.inflight_per_key
    leases_per_consumer: Annotated[int, Field(ge=1)] = Limits.leases_per_consumer
    payload_bytes_max: Annotated[int, Field(ge=1)] = Limits.payload_bytes_max
    mqueue_creates_topics: bool = True  # an enqueue over MQueue's API makes the topics that it names
    mqueue_topics_per_namespace_max: Annotated[int, Field(ge=0, le=1 << 20)] = 100  # past so many, it makes no more
    mqueue_topics_max: Annotated[int, Field(ge=0, le=1 << 20)] = 1000  # the same over all namespaces
    mqueue_rate: Rate = 0.0  # requests a second over MQueue's API that a namespace may make; 0 = no limit
    mqueue_rates: dict[str, Rate] = {}  # the same for single namespaces, by name
    mqueue_burst: Annotated[float, Field(ge=0, le=3600)] = 1.0  # seconds' worth of requests that may come at once
    # Seconds of silence until a client is asked for a sign of life. One that gives none loses its streams and waiting
    # pops: else they would go on taking messages for nobody.
    keepalive: Annotated[float, Field(ge=0.1, le=7200)] = 30.0
    broker: dict[str, Any] = {}  # of BrokerConfig, by name
    tls_certificate: Path | None = None  # PEM, with intermediates; none: no TLS, on loopback only
    tls_key: Path | None = None  # its private key, mode 0600
    tls_client_ca: Path | None = None  # authorities whose clients get as far as sending a key (mTLS); none: all do
    plaintext: bool = False  # no TLS beyond loopback either: keys and messages can be read on the way
    metrics_public: bool | None = None  # /metrics without a key; None: only where the host is loopback
    otlp_endpoint: str | None = None  # where traces go; OTEL_EXPORTER_OTLP_ENDPOINT does too. None: nowhere
    trace_sample: Annotated[float, Field(ge=0, le=1)] = 0.01  # of the calls whose caller has not decided it
    log_format: Literal["text", "json"] | None = None  # None: text on a terminal, JSON otherwise
    insecure_everybody: bool = False  # no guard: whoever reaches the port is administrator. For trials on loopback.

    @property
    def on_loopback(self) -> bool:
        return is_loopback(self.host)

    def broker_config(self) -> BrokerConfig:
        return make_broker_config({"gather_steps": GATHER_STEPS} | self.broker)

    def limits(self) -> Limits:
        return Limits(
            streams_per_key=self.streams_per_key, inflight_per_key=self.inflight_per_key,
            leases_per_consumer=self.leases_per_consumer, payload_bytes_max=self.payload_bytes_max,
        )  # fmt: skip

    def tls_files(self) -> TlsFiles | None:
        if self.tls_certificate is None or self.tls_key is None:
            return None
        return TlsFiles(certificate=self.tls_certificate, key=self.tls_key, client_ca=self.tls_client_ca)

    def mqueue_rules(self) -> MQueueRules:
        return MQueueRules(
            creates_topics=self.mqueue_creates_topics, topics_per_namespace_max=self.mqueue_topics_per_namespace_max,
            topics_max=self.mqueue_topics_max, rate=self.mqueue_rate, rates=self.mqueue_rates, burst=self.mqueue_burst,
        )  # fmt: skip

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource, dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:  # fmt: skip
        return init_settings, env_settings


def read_settings(file: Path | None = None, **flags: Any) -> ServerSettings:
    """All sources together; flags that are None were not given."""
    try:
        from_file = {} if file is None else yaml.safe_load(file.read_text()) or {}
        if not isinstance(from_file, dict):
            raise BadRequest(f"{file} must hold names and values")
        given = {name: value for name, value in flags.items() if value is not None}
        from_environment = ServerSettings().model_dump(exclude_unset=True)
        usual = {"otlp_endpoint": os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or None}
        settings = ServerSettings(**(usual | from_file | from_environment | given))
    except (ValidationError, yaml.YAMLError, OSError) as error:
        raise BadRequest(f"the server's settings do not fit: {error}") from None
    _check_exposure(settings)
    settings.broker_config()
    settings.mqueue_rules().validate()
    return settings


def _check_exposure(settings: ServerSettings) -> None:
    """Whom the ports are open to, and whether what they say can be overheard."""
    if (settings.tls_certificate is None) != (settings.tls_key is None):
        raise BadRequest("tls_certificate and tls_key go together: give both, or neither")
    if settings.tls_client_ca is not None and settings.tls_certificate is None:
        raise BadRequest("tls_client_ca asks clients for certificates over TLS: give tls_certificate and tls_key too")
    if is_loopback(settings.host):
        return
    if settings.insecure_everybody:
        raise BadRequest(f"insecure_everybody goes with loopback only, not with host={settings.host!r}")
    if settings.tls_certificate is None and not settings.plaintext:
        raise BadRequest(
            f"host={settings.host!r} is open to others, and without TLS they can read every key and message: give "
            "--tls-certificate and --tls-key (`heapline certs dev DIR` makes a set for trials), or say --plaintext "
            "if something else encrypts what is sent"
        )


def is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
