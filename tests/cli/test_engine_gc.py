"""Garbage of an engine from the command line: shown, and removed when told."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.conftest import Cli

import tidelog


def entries(count: int) -> bytes:
    """A bucket, and the same three objects over and over."""
    lines = [json.dumps({"seq": 1, "op": "create_bucket", "bucket": "b"})]
    for seq in range(2, count + 1):
        entry = {"seq": seq, "op": "put_object", "bucket": "b", "key": f"k{seq % 3}", "data": f"{seq}" * 600}
        lines.append(json.dumps(entry))
    return "\n".join(lines).encode()


def test_it_is_shown_first_and_done_with_apply(cli: Cli, tmp_path: Path) -> None:
    """In the store: versions and objects; what is left can be read, what is gone is told."""
    (tmp_path / "tidelog.toml").write_text("[storage_engine]\nwal_segment_size = 16384\n")
    config = ("--config", tmp_path / "tidelog.toml")
    url = f"file://{tmp_path}/store"
    assert cli("engine", "apply", "--store", url, "--low-water-mark", *config, stdin=entries(120)).code == 0
    for command in ("ship", "checkpoint"):
        assert cli("engine", command, *config).code == 0
    kept = cli("engine", "gc", "--json").json
    assert (kept["is_applied"], kept["plan"]["removable_versions"], kept["plan"]["droppable_bytes"]) == (False, 0, 0)
    shown = cli("engine", "gc", "engine", "--horizon", 110, "--json").json["plan"]
    assert (shown["place"], shown["horizon_seq"], shown["removable_versions"]) == ("store", 110, 106)
    told = cli("engine", "gc", "--horizon", 110)
    assert (told.code, "do it with --apply" in told.err) == (0, True)
    done = cli("engine", "gc", "--horizon", 110, "--apply", "--json").json
    assert done["is_applied"]
    assert done["report"]["removed_versions"] == 106
    assert done["report"]["dropped_bytes"] == shown["droppable_bytes"] > 0
    assert cli("engine", "get", "b", "k0", "--seq", 111).code == 0
    gone = cli("engine", "get", "b", "k0", "--seq", 90)
    assert (gone.code != 0, "states before seq 110 are no longer kept" in gone.err) == (True, True)
    assert cli("engine", "verify").code == 0
    assert "nothing to collect" in cli("engine", "gc", "--apply").err


def test_an_engine_on_this_disk_alone(cli: Cli) -> None:
    """Its files are the pieces."""
    assert cli("engine", "apply", "--low-water-mark", stdin=entries(20)).code == 0
    assert cli("engine", "gc", "--json").json["plan"]["place"] == "disk"
    applied = cli("engine", "gc", "--horizon", 20, "--apply")
    assert (applied.code, "history begins at seq 20" in applied.err) == (0, True)
    assert cli("engine", "verify").code == 0


def contents(*directories: Path) -> dict[Path, bytes]:
    """Every file, and what is in it. Who holds a lock writes its number into the lock's file."""
    found = [path for directory in directories for path in directory.rglob("*") if path.is_file()]
    return {path: path.read_bytes() for path in found if path.name != "lock"}


def test_looking_changes_nothing(cli: Cli, tmp_path: Path) -> None:
    """Neither here nor in the store, whose owner goes on: what is shown is what its owner would do."""
    url = f"file://{tmp_path}/store"
    assert cli("engine", "apply", "--store", url, "--low-water-mark", stdin=entries(60)).code == 0
    for command in ("ship", "checkpoint"):
        assert cli("engine", command).code == 0
    before = contents(tmp_path / "engine", tmp_path / "store")
    shown = cli("engine", "gc", "--horizon", 50, "--json").json["plan"]
    assert contents(tmp_path / "engine", tmp_path / "store") == before
    with tidelog.open_engine(tmp_path / "engine") as engine:
        planned = engine.plan_garbage(50)
    assert shown["removable_versions"] == planned.removable_versions == 46
    assert (shown["drop_below_lsn"], shown["horizon_seq"]) == (planned.drop_below_lsn, 50)
    assert [piece["piece"] for piece in shown["pieces"]] == [piece.name for piece in planned.pieces]


def test_who_holds_history_back_is_told(cli: Cli) -> None:
    """The low-water mark, as long as nobody has said that all replicas have everything."""
    assert cli("engine", "apply", stdin=entries(20)).code == 0
    told = cli("engine", "gc", "--horizon", 20)
    assert "held back by the low-water mark: what is above seq 0 may still be rolled back" in told.err
    assert "low-water mark" in cli("engine", "gc", "--horizon", 20, "--json").json["plan"]["held_back_by"]
