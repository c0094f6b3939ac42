"""The engine's settings, and how a file, variables and keywords reach them."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from tidelog.config import describe, explain_settings, load_engine_config, load_settings
from tidelog.config.load import EngineConfig, settings_of, tables_of
from tidelog.engine.settings import EngineSettings
from tidelog.engine.wal.wal import log_settings
from tidelog.errors import ConfigError

EXAMPLE = """
[storage_engine]
rotate_max_bytes = "100MB"
wal_sync_mode = "fsync"
wal_compression = "zstd"
buffer_pool_bytes = "1GB"
eviction_policy = "lru"
page_size = "8KB"
s3_bucket = "my-storage-engine"
s3_prefix = "data/"
ship_interval_seconds = 10
ship_batch_objects = 100
ship_compression = "zstd"
checkpoint_interval_seconds = 300
checkpoint_max_age_seconds = 3600
compaction_enabled = true
compaction_interval_seconds = 3600
compaction_max_bytes = "100MB"
"""

ORIGINAL = """
[storage_engine]
wal_segment_size = "100MB"
wal_sync_mode = "fsync"
wal_compression = "zstd"
buffer_pool_size = "1GB"
eviction_policy = "lru"
page_size = "8KB"
s3_bucket = "my-storage-engine"
s3_prefix = "data/"
shipping_interval_secs = 10
shipping_batch_size = 100
s3_compression = "zstd"
checkpoint_interval_secs = 300
checkpoint_max_age_secs = 3600
compaction_enabled = true
compaction_interval_secs = 3600
compaction_size_threshold = "100MB"
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Where the settings file of a test is."""
    return tmp_path / "tidelog.toml"


def load(config: Path | None = None, environment: dict[str, str] | None = None, **keywords: object) -> EngineSettings:
    return load_engine_config(config, environment or {}, keywords).storage_engine


def refusal(config: Path | None = None, environment: dict[str, str] | None = None, **keywords: object) -> str:
    with pytest.raises(ConfigError) as caught:
        load(config, environment, **keywords)
    return str(caught.value)


def test_everything_has_a_default() -> None:
    """An engine can be opened without a word about settings."""
    assert load() == EngineSettings()


def test_a_full_file_is_read(config: Path) -> None:
    """Sizes with units, modes, and where the store is."""
    config.write_text(EXAMPLE)
    settings = load(config)
    assert settings.rotate_max_bytes == settings.compaction_max_bytes == 100_000_000
    assert settings.buffer_pool_bytes == 1_000_000_000
    assert (settings.wal_sync_mode, settings.wal_compression, settings.ship_compression) == ("fsync", "zstd", "zstd")
    assert settings.page_bytes == 8192
    assert settings.store_url == "s3://my-storage-engine/data"
    assert (settings.checkpoint_interval_seconds, settings.compaction_enabled) == (300, True)


def test_the_names_of_the_original_design_are_accepted(config: Path) -> None:
    """In a file, in variables and as keywords; they are the same settings."""
    config.write_text(EXAMPLE)
    expected = load(config)
    config.write_text(ORIGINAL)
    assert load(config) == expected
    for alias, name in EngineSettings.ALIASES.items():
        value = {"ship_compression": "zstd", "ship_compression_level": 19, "ship_concurrency": 5}.get(name, 64 * 8192)
        wanted = load_engine_config(None, {}, {name: value}).storage_engine
        assert getattr(wanted, name) == value != getattr(load(), name)
        assert load_engine_config(None, {}, {alias: value}).storage_engine == wanted
        assert load(None, {f"TIDELOG_ENGINE_{alias.upper()}": str(value)}) == wanted


def test_names_with_nothing_to_choose_are_accepted_and_set_nothing(config: Path) -> None:
    """The original design names a page size and an eviction policy. There is one of each, and they are no settings."""
    for name, accepted in EngineSettings.CONSTANTS.items():
        assert name not in EngineSettings.__struct_fields__
        for value in accepted:
            config.write_text(f'[storage_engine]\n{name} = "{value}"\n')
            assert load(config) == load(None, {f"TIDELOG_ENGINE_{name.upper()}": value}) == load()
            assert load(None, {}, **{name: value}) == load()
        config.write_text(f'[storage_engine]\n{name} = "other"\n')
        said = f"{name} must be one of {', '.join(accepted)}, not 'other'"
        assert said in refusal(config)
        assert said.upper() in refusal(None, {f"TIDELOG_ENGINE_{name.upper()}": "other"}).upper()
    assert load(page_size=8192) == load()


def test_a_source_that_gives_a_setting_by_two_names_is_refused(config: Path) -> None:
    """It would be a guess which one is meant. Another source may use the other name: the later one wins."""
    config.write_text("[storage_engine]\nwal_segment_size = 8192\nrotate_max_bytes = 9000\n")
    said = (
        "[storage_engine] rotate_max_bytes is given twice: it is the same setting as [storage_engine] wal_segment_size"
    )
    assert said in refusal(config)
    both = {"TIDELOG_ENGINE_WAL_SEGMENT_SIZE": "8192", "TIDELOG_ENGINE_ROTATE_MAX_BYTES": "9000"}
    assert "the same setting as TIDELOG_ENGINE_ROTATE_MAX_BYTES" in refusal(None, both)
    assert "the same setting as the keyword hot_tier_bytes" in refusal(hot_tier_bytes=1, local_retention_bytes=2)
    config.write_text("[storage_engine]\nwal_segment_size = 8192\n")
    assert load(config, {"TIDELOG_ENGINE_ROTATE_MAX_BYTES": "9000"}).rotate_max_bytes == 9000


def test_a_shared_name_is_set_for_topics_and_engines_apart(config: Path) -> None:
    """By table, by variable, and by what is opened; at the top of a file it is a topic's."""
    config.write_text(
        "rotate_max_seconds = 7\n[log]\nrotate_max_bytes = 5000\n[storage_engine]\nrotate_max_bytes = 6000\n"
    )
    loaded = load_engine_config(config, {"TIDELOG_SHIP_INTERVAL_SECONDS": "3"}, {"ship_interval_seconds": 4})
    assert (loaded.log.rotate_max_bytes, loaded.storage_engine.rotate_max_bytes) == (5000, 6000)
    assert (loaded.log.rotate_max_seconds, loaded.storage_engine.rotate_max_seconds) == (7, 3600)
    assert (loaded.tier.ship_interval_seconds, loaded.storage_engine.ship_interval_seconds) == (3, 4)
    shown = describe(loaded)
    assert (shown["rotate_max_bytes"], shown["storage_engine.rotate_max_bytes"]) == (5000, 6000)


def test_an_explanation_says_which_alias_was_used(config: Path) -> None:
    """The setting is shown under its own name."""
    config.write_text("[storage_engine]\nwal_segment_size = 8192\n")
    explained = {(one.table, one.name): one for one in explain_settings(config, {}, {})}
    found = explained["storage_engine", "rotate_max_bytes"]
    assert (found.value, found.source, found.alias) == (8192, str(config), "wal_segment_size")
    assert explained["log", "rotate_max_bytes"].source == "default"


def test_the_later_source_wins(config: Path) -> None:
    """The file comes first, then variables, then keywords, one setting at a time."""
    config.write_text("[storage_engine]\nshipping_batch_size = 1\nshipping_concurrency = 1\nkeep_versions = 1\n")
    variables = {"TIDELOG_ENGINE_SHIP_CONCURRENCY": "2", "TIDELOG_ENGINE_KEEP_VERSIONS": "2"}
    settings = load(config, variables, keep_versions=3)
    assert (settings.ship_batch_objects, settings.ship_concurrency, settings.keep_versions) == (1, 2, 3)


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("rotate_max_bytes", "64MiB", 64 << 20),
        ("rotate_max_bytes", 4096, 4096),
        ("rotate_max_seconds", "1h", 3600),
        ("buffer_pool_bytes", "1GB", 1_000_000_000),
        ("inline_value_bytes", "0", 0),
        ("checkpoint_interval_seconds", "0.5s", 0.5),
        ("local_retention_bytes", "2GiB", 2 << 30),
        ("compaction_max_bytes", "1kB", 1000),
        ("wal_compression_level", -5, -5),
        ("keep_seconds", "7d", 7 * 86400),
        ("disk_cache_bytes", "1GiB", 1 << 30),
        ("replicas", ["s3://a", "s3://b"], ("s3://a", "s3://b")),
        ("replicas", "s3://a, file:///b", ("s3://a", "file:///b")),
    ],
)
def test_values_are_given_as_people_write_them(name: str, given: object, expected: object) -> None:
    """Sizes and durations take units; lists may be one text."""
    assert getattr(load(None, {}, **{name: given}), name) == expected
    if isinstance(given, str):
        assert getattr(load(None, {f"TIDELOG_ENGINE_{name.upper()}": given}), name) == expected


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("page_size", "4KB", "the keyword page_size must be one of 8192, 8KB, 8KiB, not '4KB'"),
        ("page_size", 4096, "the keyword page_size must be one of 8192, 8KB, 8KiB, not 4096"),
        ("eviction_policy", "fifo", "the keyword eviction_policy must be one of lru"),
        ("wal_sync_mode", "always", "one of fdatasync, fsync, none"),
        ("wal_compression", "lz4", "one of none, zstd"),
        ("wal_compression_level", 30, "at least -7, at most 19"),
        ("inline_value_bytes", 513, "at most 512"),
        ("buffer_pool_bytes", "1KB", "at least"),
        ("rotate_max_bytes", "100 apples", 'text such as "64MiB"'),
        ("ship_concurrency", 0, "at least 1"),
        ("checkpoint_interval_seconds", 0, "more than 0"),
        ("compaction_enabled", "perhaps", "true or false"),
        ("replicas", [1], "a list of texts"),
        ("keep_versions", 0, "at least 1"),
    ],
)
def test_what_a_setting_does_not_accept_is_refused_by_name(name: str, given: object, said: str) -> None:
    """The error says which setting, what was given and what would be right."""
    text = refusal(None, {}, **{name: given})
    assert name in text
    assert said in text


def test_unknown_names_are_refused(config: Path) -> None:
    """In every source, with the nearest known name."""
    config.write_text("[storage_engine]\nwal_segment_sise = 5\n")
    assert "Did you mean wal_segment_size?" in refusal(config)
    assert "Did you mean TIDELOG_ENGINE_KEEP_VERSIONS?" in refusal(None, {"TIDELOG_ENGINE_KEEP_VERSION": "2"})
    assert "TIDELOG_WAL_SEGMENT_SIZE is not a setting" in refusal(None, {"TIDELOG_WAL_SEGMENT_SIZE": "8KB"})
    assert "Did you mean keep_versions?" in refusal(keep_version=1)


def test_one_file_serves_topics_and_engines(config: Path) -> None:
    """Whoever opens topics is not disturbed by an engine's table, and the other way round; both are checked."""
    config.write_text(EXAMPLE + "[log]\nfsync_interval_ms = 7\n")
    variables = {"TIDELOG_ENGINE_KEEP_VERSIONS": "2", "TIDELOG_DIR": "/data"}
    topics, engine = load_settings(config, variables, {}), load_engine_config(config, variables, {})
    assert topics.log.fsync_interval_ms == engine.log.fsync_interval_ms == 7
    assert not hasattr(topics, "storage_engine")
    assert (engine.storage_engine.keep_versions, engine.dir) == (2, "/data")
    with pytest.raises(ConfigError, match="TIDELOG_ENGINE_KEEP_VERSIONS must be a whole number"):
        load_settings(config, {"TIDELOG_ENGINE_KEEP_VERSIONS": "many"}, {})


def test_keywords_are_those_of_what_is_opened() -> None:
    """No keyword is accepted and then ignored: the other one's say where they belong."""
    with pytest.raises(ConfigError, match=r"keep_versions is not a setting here.*open_engine"):
        load_settings(None, {}, {"keep_versions": 1})
    assert "fsync_interval_ms is not a setting here. It is for topics" in refusal(fsync_interval_ms=5)
    assert load_engine_config(None, {}, {"store": "s3://b", "dir": "/d"}).store == "s3://b"


def test_a_prefix_needs_its_bucket() -> None:
    """Half of the name of a store is a mistake."""
    assert load(s3_bucket="b").store_url == "s3://b"
    assert load().store_url is None
    with pytest.raises(ConfigError, match="without s3_bucket"):
        assert load(s3_prefix="data/").store_url


def shown(value: object) -> str:
    """A default as the guide writes it."""
    if value is None or value == ():
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value) or "empty"


def test_every_setting_is_explained_with_its_default() -> None:
    """The guide lists them all, in the order of the code."""
    guide = (Path(__file__).resolve().parents[2] / "docs" / "reference" / "engine-settings.md").read_text("utf-8")
    listed = re.findall(r"^\| `(\w+)` \| (\S+) \| \S.*\. \|$", guide, re.MULTILINE)
    assert listed == [(name, shown(getattr(EngineSettings(), name))) for name in EngineSettings.__struct_fields__]


def test_the_table_is_known_by_its_name() -> None:
    """The names in the file follow from the struct."""
    assert tables_of(EngineConfig)["storage_engine"] is EngineSettings
    names = {setting.name for setting in settings_of(EngineConfig).values() if setting.table == "storage_engine"}
    assert names == set(EngineSettings.__struct_fields__)


def test_the_logs_settings_follow_from_the_engines() -> None:
    """Files end by size and age as the engine says, and nothing that is in a file is kept in memory."""
    log = log_settings(EngineSettings(rotate_max_bytes=5000, rotate_max_seconds=9))
    assert (log.rotate_max_bytes, log.rotate_max_seconds) == (5000, 9)
    assert (log.cache_max_messages, log.cache_max_bytes) == (0, 0)
    assert msgspec.convert(msgspec.to_builtins(log), type(log)) == log
