"""Both formats for engines over a real S3 server, with settings of the store as options and from the environment."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.pipeline.engines.histories import History
from tests.pipeline.engines.test_entries import expected_rows
from tests.pipeline.engines.test_entries import rows_of as entries_of
from tests.pipeline.engines.test_objects import assert_same
from tests.servers import S3Server

from tidelog.errors import AccessDeniedError


def test_an_engine_in_a_bucket_is_read_without_it(
    s3_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Entries and objects, by ranges, before and after the raw log went; a wrong key is told as such."""
    settings = s3_server.settings()
    assert settings.store_secret_access_key is not None
    secret = settings.store_secret_access_key.reveal()
    monkeypatch.setenv("AWS_ENDPOINT_URL", str(settings.store_endpoint))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", str(settings.store_access_key_id))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    history = History(tmp_path, "s3", s3_server.url("spark-engine"))
    with history.open() as engine:
        history.grow(engine, 45)
        last = engine.applied_seq
    expected = [(row["seq"], row["order"], row["key"]) for row in expected_rows(history)]
    found = entries_of(history.store, minPartitions=3)
    assert [(row["seq"], row["order"], row["key"]) for row in found] == expected
    assert_same(history, [last], minPartitions=2)
    history.compact()
    assert_same(history, [last])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(AccessDeniedError):
        entries_of(history.store)
    given = {"store_access_key_id": settings.store_access_key_id, "store_secret_access_key": secret}
    assert entries_of(history.store, **given)
