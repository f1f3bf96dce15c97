"""Settings of a server: what is refused, and what an error may show."""

from __future__ import annotations

from pathlib import Path

import pytest

from heapline.contract.errors import BadRequest
from heapline.server.settings import read_settings


@pytest.mark.parametrize(
    "text",
    [
        "postgres: [postgresql://u:secret@h/db\nport: 1\n",
        "\npostgres: postgresql://u:secret@h/db: x\n",
        "\npostgres: @secret\n",
        "\npostgres: *secret\n",
        "\npostgres: !secret x\n",
    ],
)
def test_error_in_the_settings_file_shows_its_place_and_not_its_passwords(tmp_path: Path, text: str) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(text)
    with pytest.raises(BadRequest, match=r"server\.yaml is not valid YAML; see line 2, column \d+$") as caught:
        read_settings(file)
    assert "secret" not in str(caught.value)


def test_error_in_a_setting_begins_with_its_name() -> None:
    with pytest.raises(BadRequest, match=r"^invalid server settings: grpc_port: expected `int` <= 65535$"):
        read_settings(grpc_port=99999)
    with pytest.raises(BadRequest, match=r"^invalid server settings: Object contains unknown field `prot`$"):
        read_settings(prot=1)


def test_printed_settings_do_not_show_passwords() -> None:
    settings = read_settings(
        broker_type="sql", postgres=["postgresql://u:secret@h/db"], broker={"redis": "redis://:secret@h"}
    )
    assert repr(settings) == "ServerSettings(broker_type='sql', data='data', host='127.0.0.1')"


def test_server_keeps_series_unless_it_is_configured_not_to(tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("{}")
    assert read_settings(file).broker_config().series
    file.write_text("broker: {series: false}\nsession_lifetime: 3600\n")
    settings = read_settings(file)
    assert not settings.broker_config().series
    assert settings.session_ms == 3_600_000
