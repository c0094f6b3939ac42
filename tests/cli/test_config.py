"""`tidelog config`: what is in force, and where each value comes from."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cli.conftest import Cli


def in_force(cli: Cli, *arguments: str, engine: bool = False) -> dict[str, tuple[object, str]]:
    """The settings of topics, or of engines."""
    rows = cli("config", "--json", *arguments).json
    wanted = [row for row in rows if (row["table"] == "storage_engine") == engine]
    return {row["setting"]: (row["value"], row["source"]) for row in wanted}


def test_every_value_has_its_source(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """File, variable, option, what the directory remembers, default; the later source wins."""
    cli("produce", "a/b", "--no-ship", "--store", (tmp_path / "store").as_uri(), stdin=b"x\n")
    settings = tmp_path / "tidelog.toml"
    settings.write_text('[log]\nfsync_interval_ms = "2s"\nrotate_max_bytes = "1MiB"\n')
    monkeypatch.setenv("TIDELOG_FSYNC_INTERVAL_MS", "3s")
    found = in_force(cli, "--config", str(settings), "--dir", "data")
    assert found["fsync_interval_ms"] == (3000, "TIDELOG_FSYNC_INTERVAL_MS")
    assert found["rotate_max_bytes"] == (1 << 20, str(settings))
    assert found["dir"] == ("data", "command line")
    assert found["store"] == ((tmp_path / "store").as_uri(), "tidelog.json")
    assert found["ship_index_messages"] == (1000, "default")
    assert in_force(cli)["dir"] == ("data", "default")
    changed = in_force(cli, "--config", str(settings), "--changed")
    assert set(changed) == {"fsync_interval_ms", "rotate_max_bytes", "store", "metadata", "metadata_root"}


def test_an_alias_is_shown_as_what_it_stands_for(cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Under the setting's own name, with the alias beside the source."""
    settings = tmp_path / "tidelog.toml"
    settings.write_text('[storage_engine]\nwal_segment_size = "1MiB"\n')
    monkeypatch.setenv("TIDELOG_ENGINE_S3_COMPRESSION", "zstd")
    found = in_force(cli, "--config", str(settings), "--changed", engine=True)
    assert found == {
        "rotate_max_bytes": (1 << 20, f"{settings}, as wal_segment_size"),
        "ship_compression": ("zstd", "TIDELOG_ENGINE_S3_COMPRESSION, as s3_compression"),
    }


def test_secrets_are_not_shown(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not their value, only that there is one."""
    monkeypatch.setenv("TIDELOG_STORE_SECRET_ACCESS_KEY", "s3cr3t")
    shown = cli("config")
    assert "s3cr3t" not in shown.out.decode()
    assert "store_secret_access_key\t***\tTIDELOG_STORE_SECRET_ACCESS_KEY" in shown.out.decode()


def test_a_wrong_setting_is_named(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """As any command would."""
    monkeypatch.setenv("TIDELOG_FSYNC_INTERVAL_MS", "soon")
    result = cli("config")
    assert result.code == 2
    assert "TIDELOG_FSYNC_INTERVAL_MS must be a whole number of milliseconds" in result.err
