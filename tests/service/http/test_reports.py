"""Reports of jobs that are kept with the server."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.service.http.serving import Served, serving

REPORTS = "/v1/reports"
JSON = {"content-type": "application/json"}


def test_stored_report_is_read_as_it_was(tmp_path: Path) -> None:
    """Also after a restart; one of the same name is replaced, and the list has the newest first."""
    with serving(tmp_path / "data") as served:
        assert served.ok("GET", REPORTS) == {"reports": []}
        for name, text in (("verify-1", b'{"ok": false}'), ("compact-1", b"[1]"), ("verify-1", b'{"ok":  true}')):
            assert served.call("PUT", f"{REPORTS}/{name}", text, JSON).status == 204
    with serving(tmp_path / "data") as served:
        assert served.call("GET", f"{REPORTS}/verify-1").body == b'{"ok":  true}'
        listed = served.ok("GET", REPORTS)["reports"]
        assert {(one["name"], one["bytes"]) for one in listed} == {("verify-1", 13), ("compact-1", 3)}
        assert [one["name"] for one in served.ok("GET", f"{REPORTS}?prefix=comp")["reports"]] == ["compact-1"]
        assert served.ok("GET", "/v1/topics")["topics"] == []


def test_wrong_reports_are_refused(served: Served) -> None:
    """A name that is no name of a file, and a body that is no JSON."""
    assert served.call("PUT", f"{REPORTS}/..%2Fx", b"{}", JSON).status == 400
    assert served.call("PUT", f"{REPORTS}/.hidden", b"{}", JSON).status == 400
    assert served.call("PUT", f"{REPORTS}/a", b"{", JSON).status == 400
    assert served.call("GET", f"{REPORTS}/a").status == 404


def test_oldest_reports_make_room(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that reports for ever does not fill the disk."""
    monkeypatch.setattr("tidelog.service.http.reports._KEPT", 3)
    for number in range(5):
        served.call("PUT", f"{REPORTS}/r{number}", b"{}", JSON)
    assert {one["name"] for one in served.ok("GET", REPORTS)["reports"]} == {"r2", "r3", "r4"}
