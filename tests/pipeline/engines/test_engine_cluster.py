"""All jobs over an engine as commands on a standalone master with two workers, which know only what they are sent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.pipeline.engines.engine_places import EngineHome
from tests.pipeline.spark_servers import run_driver
from tests.servers import ACCESS_KEY_ID, SECRET_ACCESS_KEY, S3Server

import tidelog

# One driver for all of them: a session takes longer to start than any of these jobs.
PROGRAM = """
import contextlib, io, json, sys
import tidelog
from tidelog.cli.app import run
from tidelog.pipeline.jobs.engine import restore as restore_steps

restore_steps._DONE_BY_DRIVER = 0  # this engine is so small that it would do everything itself
master, engine, directory = sys.argv[1:]
spark = tidelog.spark_session("cluster", master, **{
    "spark.driver.host": "127.0.0.1",
    "spark.executor.memory": "512m",
    "spark.sql.shuffle.partitions": "2",
    "spark.scheduler.minRegisteredResourcesRatio": 1.0,
    "spark.scheduler.maxRegisteredResourcesWaitingTime": "120s",
})

def command(name, *arguments):
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        code = run(["--json", "pipeline", name, "--engine", engine, "--master", master, *arguments])
    return {"code": code, **json.loads(told.getvalue() or "{}")}

def rows(name, **options):
    return spark.read.format(name).options(root=engine, **options).load()

found = {
    "entries": rows("tidelog_entries").selectExpr("count(distinct seq)").first()[0],
    "compact": command("compact"),
    "checkpoint": command("checkpoint"),
    "gc": command("gc", "--now", "--grace", "0"),
    "verify": command("verify"),
    "digest": command("digest"),
    "objects": sorted(tuple(row) for row in rows("tidelog_objects").select("bucket", "key", "seq").collect()),
    "replay": command("replay", "--to-engine", directory + "/copy"),
    "restore": command("restore", directory + "/new"),
}
print(json.dumps(found))
spark.stop()
"""


@pytest.fixture
def variables(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """How this process and the driver reach the store; the workers' own environment says nothing of it."""
    found = {
        "TIDELOG_STORE_ENDPOINT": s3_server.endpoint,
        "TIDELOG_STORE_ACCESS_KEY_ID": ACCESS_KEY_ID,
        "TIDELOG_STORE_SECRET_ACCESS_KEY": SECRET_ACCESS_KEY,
    }
    for name, value in found.items():
        monkeypatch.setenv(name, value)
    return found


@pytest.mark.long
def test_every_job_runs_on_a_cluster(
    spark_cluster: str, s3_server: S3Server, variables: dict[str, str], tmp_path: Path
) -> None:
    """One engine in a bucket: read, compacted, collected, verified, replayed and restored, with the same digest."""
    home = EngineHome(tmp_path, local_retention_bytes=0)
    home.url = s3_server.url("engine-on-a-cluster")
    with home.open() as engine:
        home.feed(engine, 250)
        digest, seqs = engine.digest(), 250
        listed = sorted(
            (bucket, one.key, one.seq) for bucket in engine.list_buckets() for one in engine.list_objects(bucket)
        )
    told: dict[str, Any] = json.loads(run_driver(PROGRAM, spark_cluster, home.url, str(tmp_path), **variables))
    jobs = {name: one for name, one in told.items() if isinstance(one, dict)}
    assert {name: (one["code"], one.get("findings")) for name, one in jobs.items()} == {name: (0, []) for name in jobs}
    assert told["entries"] == seqs
    assert told["digest"]["digest"] == digest
    assert [tuple(one) for one in told["objects"]] == listed
    assert told["gc"]["removed_objects"] > 0
    assert told["gc"]["log_start_lsn"] > 1
    for name in ("copy", "new"):
        with tidelog.open_engine(tmp_path / name) as engine:
            assert (engine.applied_seq, engine.digest()) == (home.seq, digest)
            for bucket, key, seq in listed:
                assert engine.read(bucket, key).seq == seq
