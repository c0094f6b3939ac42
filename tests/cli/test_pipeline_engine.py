"""What commands of `tidelog pipeline` over an engine share: which engine is meant, and what does not go together."""

from __future__ import annotations

from pathlib import Path

import pytest

import tidelog
from tidelog.cli.main import main
from tidelog.cli.pipeline.job import engine_root, refuse_engine_options, refuse_topic_options, run_engine_job
from tidelog.cli.session import Session
from tidelog.errors import InputError, NotFoundError
from tidelog.pipeline.address import find_engine
from tidelog.pipeline.jobs.job import JobReport


def test_an_engine_is_named_by_its_option_or_by_the_common_ones(tmp_path: Path) -> None:
    """--engine wins over --dir, and that over --store; settings come from the file that --config names."""
    (tmp_path / "tidelog.toml").write_text('[object_store]\nstore_region = "eu-north-1"\n')
    tidelog.open_engine(tmp_path / "e", store=f"file://{tmp_path}/s").close()
    session = Session(directory=tmp_path / "e", store="s3://bucket/other", config=tmp_path / "tidelog.toml")
    assert engine_root(session, "s3://bucket/prefix", "mine").name == "mine"
    assert engine_root(session, "s3://bucket/prefix").load().object_store.store_region == "eu-north-1"
    assert engine_root(Session(directory=tmp_path / "e"), None).directory == tmp_path / "e"
    assert engine_root(Session(store="s3://bucket/other"), None).store_url == "s3://bucket/other"
    with pytest.raises(InputError, match="no engine was named"):
        engine_root(Session(), None)


def test_options_of_topics_and_of_engines_do_not_mix() -> None:
    """The error names those that do not go together."""
    refuse_topic_options("./engine", {"TOPIC": [], "--root": None, "--by-key": False})
    with pytest.raises(InputError, match="TOPIC, --root is for topics"):
        refuse_topic_options("./engine", {"TOPIC": ["shop/orders"], "--root": "data"})
    refuse_engine_options({"--large-bytes": None, "--now": False})
    with pytest.raises(InputError, match="--keep-from is for engines"):
        refuse_engine_options({"--keep-from": 0})


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--to-engine", "copy", "--seqs", "header"], "--seqs is for a topic, but --to-engine names an engine"),
        (["--to-engine", "copy", "--to", "a/b"], "--to is for a topic"),
        (["--to", "a/b", "--from", "0"], "--from is for topics"),
        (["--to", "a/b", "--step", "10"], "--step is for topics"),
    ],
)
def test_a_replay_ignores_no_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], says: str
) -> None:
    """What has no meaning for an engine as the source, or as the target, is refused by name."""
    tidelog.open_engine(tmp_path / "e", store=f"file://{tmp_path}/s").close()
    assert main(["pipeline", "replay", "--engine", str(tmp_path / "e"), *options]) == 2
    assert says in capsys.readouterr().err


def test_an_engine_that_is_not_there_is_told_before_spark_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slip in the address costs no start of Spark; a restore that knows a replica goes on to that."""
    started: list[str] = []
    monkeypatch.setattr("tidelog.cli.pipeline.job.run_in_spark", lambda session, job, *rest: started.append(job))
    root = find_engine(f"file://{tmp_path}/slip")
    with pytest.raises(NotFoundError, match="no such directory"):
        run_engine_job(Session(), "verify", root, None, lambda *_: JobReport(job="verify"))
    run_engine_job(Session(), "restore", root, None, lambda *_: JobReport(job="restore"), may_be_missing=True)
    assert started == ["restore"]
