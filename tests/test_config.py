"""Settings from a file, the environment and keywords."""

from __future__ import annotations

import pickle
import traceback
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import pytest

from tidelog.cold.settings import TierSettings
from tidelog.config import Settings, describe, load_as, load_settings
from tidelog.config.load import settings_of
from tidelog.errors import ConfigError
from tidelog.log.settings import LogSettings
from tidelog.secret import Secret
from tidelog.store import settings as store_settings

PASSWORD = "correct horse battery staple"


class VaultSettings(msgspec.Struct, frozen=True, kw_only=True):
    """A table with every kind of setting, one of them a secret."""

    secret_key: Secret | None = None
    mode: Literal["local", "remote"] = "local"
    verify: bool = True
    ratio: Annotated[float, msgspec.Meta(gt=0, lt=1)] = 0.5
    attempts: Annotated[int, msgspec.Meta(ge=1)] | None = None


class VaultAndLog(Settings, frozen=True, kw_only=True):
    """What `Settings` looks like with one table more."""

    vault: VaultSettings = msgspec.field(default_factory=VaultSettings)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Where the settings file of a test is."""
    return tmp_path / "tidelog.toml"


def load_error(
    config: Path | None = None, environment: dict[str, str] | None = None, **overrides: object
) -> ConfigError:
    """The error that these settings end in."""
    with pytest.raises(ConfigError) as caught:
        load_as(VaultAndLog, config, environment or {}, overrides)
    return caught.value


def load(config: Path | None = None, environment: dict[str, str] | None = None, **overrides: object) -> VaultAndLog:
    """The settings, with the table `vault` as well."""
    return load_as(VaultAndLog, config, environment or {}, overrides)


def test_everything_has_a_default() -> None:
    """Without file, variables and keywords the settings are the defaults of their components."""
    settings = load_settings(None, {}, {})
    assert settings.dir is None
    assert settings.log == LogSettings()


def test_the_later_source_wins(config: Path) -> None:
    """A keyword wins over a variable and a variable over the file, one setting at a time."""
    config.write_text("[log]\nfsync_interval_ms = 1\nrotate_max_seconds = 1\ncache_max_messages = 1\n")
    environment = {"TIDELOG_ROTATE_MAX_SECONDS": "2", "TIDELOG_CACHE_MAX_MESSAGES": "2"}
    log = load_settings(config, environment, {"cache_max_messages": 3}).log
    assert (log.fsync_interval_ms, log.rotate_max_seconds, log.cache_max_messages) == (1, 2, 3)


def test_a_setting_may_stand_at_the_top_of_the_file(config: Path) -> None:
    """A setting is found in its table and at the top level alike."""
    config.write_text('dir = "data"\nfsync_interval_ms = 7\n[log]\nrotate_max_seconds = 8\n')
    settings = load_settings(config, {}, {})
    assert (settings.dir, settings.log.fsync_interval_ms, settings.log.rotate_max_seconds) == ("data", 7, 8)


def test_variables_name_the_file_and_the_directory(config: Path) -> None:
    """TIDELOG_CONFIG names the file and TIDELOG_DIR the directory."""
    config.write_text("fsync_interval_ms = 7\n")
    settings = load_settings(None, {"TIDELOG_CONFIG": str(config), "TIDELOG_DIR": "/data"}, {})
    assert (settings.dir, settings.log.fsync_interval_ms) == ("/data", 7)


def test_the_environment_of_the_process_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a mapping the variables of the process count."""
    monkeypatch.setenv("TIDELOG_DIR", "/from-the-process")
    assert load_settings().dir == "/from-the-process"


def test_empty_variables_and_none_are_not_given(config: Path) -> None:
    """An empty variable and a keyword that is None leave the setting as it was."""
    config.write_text("fsync_interval_ms = 7\n")
    environment = {"TIDELOG_FSYNC_INTERVAL_MS": "", "TIDELOG_CONFIG": ""}
    assert load_settings(config, environment, {"fsync_interval_ms": None}).log.fsync_interval_ms == 7
    assert load_settings(None, environment, {}).log.fsync_interval_ms == 5000


def test_a_path_is_a_directory_name(tmp_path: Path) -> None:
    """The directory may be given as a path object."""
    assert load_settings(None, {}, {"dir": tmp_path}).dir == str(tmp_path)


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("rotate_max_bytes", "64MiB", 64 << 20),
        ("rotate_max_bytes", "64MB", 64_000_000),
        ("rotate_max_bytes", "10 KiB", 10 << 10),
        ("rotate_max_bytes", "1.5kib", 1536),
        ("rotate_max_bytes", "4096", 4096),
        ("fsync_interval_ms", "5s", 5000),
        ("fsync_interval_ms", "100ms", 100),
        ("fsync_interval_ms", "0.1s", 100),
        ("fsync_interval_ms", "100", 100),
        ("rotate_max_seconds", "1h", 3600),
        ("rotate_max_seconds", "2 min", 120),
        ("rotate_max_seconds", "3000ms", 3),
        ("cache_max_messages", "12", 12),
        ("verify", "off", False),
        ("verify", "YES", True),
        ("ratio", "0.25", 0.25),
        ("attempts", "3", 3),
        ("mode", "remote", "remote"),
    ],
)
def test_variables_are_read_by_type_and_unit(name: str, given: str, expected: object) -> None:
    """The text of a variable is read as the type and the unit of its setting say."""
    settings = load(environment={f"TIDELOG_{name.upper()}": given})
    assert describe(settings)[name] == expected


def test_sizes_and_durations_are_text_in_the_file_too(config: Path) -> None:
    """Units work in the file and in keywords as they do in variables."""
    config.write_text('[log]\nrotate_max_bytes = "1MiB"\n')
    log = load_settings(config, {}, {"fsync_interval_ms": "2s"}).log
    assert (log.rotate_max_bytes, log.fsync_interval_ms) == (1 << 20, 2000)


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("fsync_interval_ms", 0, 'whole number of milliseconds or text such as "100ms", at least 1'),
        ("fsync_interval_ms", -5, "at least 1"),
        ("fsync_interval_ms", True, "whole number"),
        ("fsync_interval_ms", 1.5, "whole number"),
        ("fsync_interval_ms", "soon", "whole number"),
        ("fsync_interval_ms", "0.0001s", "whole number"),
        ("fsync_interval_ms", 10**30, "at most 315360000000"),
        ("rotate_max_bytes", "64 bananas", 'text such as "64MiB"'),
        ("rotate_max_bytes", "9" * 5000, "at least 32"),
        ("max_message_bytes", "2GiB", "at most 1073741824"),
        ("cache_max_messages", "12", "a whole number, at least 0"),
        ("cache_max_messages", [1], "a whole number"),
        ("dir", 5, "text"),
        ("verify", "maybe", "true or false"),
        ("ratio", 1.0, "a number, more than 0, less than 1"),
        ("mode", "elsewhere", "one of local, remote"),
    ],
)
def test_wrong_values_are_explained(name: str, given: object, expected: str) -> None:
    """An error names the setting, the value and what is expected."""
    message = str(load_error(None, None, **{name: given}))
    assert f"the keyword {name} must be" in message
    assert expected in message
    assert repr(given)[:20] in message
    assert len(message) < 300


@pytest.mark.parametrize(("name", "given"), [("cache_max_messages", "1e3"), ("ratio", "nan"), ("verify", "2")])
def test_wrong_variables_are_explained(name: str, given: str) -> None:
    """An error about a variable names the variable."""
    variable = f"TIDELOG_{name.upper()}"
    assert f"{variable} must be" in str(load_error(environment={variable: given}))


def test_wrong_values_in_the_file_name_the_file(config: Path) -> None:
    """An error about the file names the file and the key in its table."""
    config.write_text("[log]\nfsync_interval_ms = 'never'\n")
    error = load_error(config)
    assert error.path == config
    assert "[log] fsync_interval_ms must be" in str(error)
    assert str(config) in str(error)


def test_unknown_keywords_suggest_the_nearest() -> None:
    """A misspelt keyword is an error that names the setting that was probably meant."""
    message = str(load_error(fsync_intervall_ms=5))
    assert "the keyword fsync_intervall_ms is not a setting" in message
    assert "Did you mean fsync_interval_ms?" in message


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("retention_ms", "retention_seconds"),
        ("retention_size", "retention_bytes"),
        ("rotate_max_mb", "rotate_max_bytes"),
    ],
)
def test_setting_in_another_unit_is_found(given: str, meant: str) -> None:
    """Loss prevented: who wrote a time in Kafka's unit was led to a limit of bytes."""
    assert f"Did you mean {meant}?" in str(load_error(**{given: 5}))  # type: ignore[arg-type]
    variable = f"TIDELOG_{given.upper()}"
    assert f"Did you mean TIDELOG_{meant.upper()}?" in str(load_error(environment={variable: "5"}))


def test_unknown_variables_suggest_the_nearest() -> None:
    """A misspelt variable is an error that names the variable that was probably meant."""
    message = str(load_error(environment={"TIDELOG_FSYNC_INTERVAL": "hush"}))
    assert "TIDELOG_FSYNC_INTERVAL is not a setting" in message
    assert "Did you mean TIDELOG_FSYNC_INTERVAL_MS?" in message
    assert "hush" not in message


@pytest.mark.parametrize(
    ("text", "problem", "suggestion"),
    [
        ("fsync_intervall_ms = 5", "fsync_intervall_ms is not a setting", "Did you mean fsync_interval_ms?"),
        ("[log]\nrotate_bytes = 5", "[log] rotate_bytes is not a setting", "Did you mean rotate_max_bytes?"),
        ("[logs]\nrotate_max_bytes = 5", "[logs] is not a table", "Did you mean log?"),
        ("[log]\ndir = 'x'", "[log] dir is in the wrong table", "Put dir at the top of the file"),
        ("[log]\nverify = true", "[log] verify is in the wrong table", "Put verify below [vault]"),
        ("log = 5", "log must be a table", "Write [log]"),
        ("[log.log]\nx = 1", "[log] log is not a setting", ""),
        ("hidden_names = ['x']", "hidden_names is not a setting", ""),
        ("zzzzzzzzz = 5", "zzzzzzzzz is not a setting", ""),
        ("attempts = 2\n[vault]\nattempts = 3", "attempts is given twice", ""),
    ],
)
def test_what_the_file_must_not_say(config: Path, text: str, problem: str, suggestion: str) -> None:
    """A key that is unknown, misplaced or doubled is an error that names it, the file and the remedy."""
    config.write_text(text)
    error = load_error(config)
    assert problem in str(error)
    assert suggestion in str(error)
    assert error.path == config


def test_a_file_that_is_not_there(config: Path) -> None:
    """A settings file that was named and does not exist is an error, not an empty file."""
    assert "there is no settings file" in str(load_error(config))
    assert "there is no settings file" in str(load_error(environment={"TIDELOG_CONFIG": str(config)}))


@pytest.mark.parametrize(("content", "problem"), [(b"dir = \n", "not TOML"), (b"dir = '\xff'", "not UTF-8")])
def test_a_file_that_is_not_toml(config: Path, content: bytes, problem: str) -> None:
    """A file that cannot be parsed is named together with the reason."""
    config.write_bytes(content)
    error = load_error(config)
    assert problem in str(error)
    assert error.path == config


def test_a_directory_is_not_a_file(tmp_path: Path) -> None:
    """A path that cannot be read as a file is named together with the reason."""
    assert "cannot be read" in str(load_error(tmp_path))


def test_foreign_and_other_variables_are_left_alone() -> None:
    """Variables of other programs, our own switches and what Kubernetes sets for a service are not settings."""
    environment = {
        "PATH": "/bin",
        "MY_TIDELOG_DIR": "x",
        "TIDELOG_SERVICE_HOST": "10.0.0.1",
        "TIDELOG_SERVICE_PORT_HTTP": "80",
        "TIDELOG_PORT": "tcp://10.0.0.1:80",
        "TIDELOG_PORT_80_TCP_ADDR": "10.0.0.1",
    }
    assert load_settings(None, environment, {}) == Settings()


def test_references_are_replaced_from_the_environment(config: Path) -> None:
    """`${NAME}` in the file stands for the variable, anywhere in the text and for numbers too."""
    config.write_text('dir = "/data/${TEAM}/${NODE}"\ncache_max_messages = "${CACHE}"\nverify = "${VERIFY}"\n')
    settings = load(config, {"TEAM": "blue", "NODE": "7", "CACHE": "99", "VERIFY": "no"})
    assert (settings.dir, settings.log.cache_max_messages) == ("/data/blue/7", 99)
    assert settings.vault.verify is False


def test_a_doubled_dollar_is_meant(config: Path) -> None:
    """`$${NAME}` stands for the text `${NAME}`, and other dollars for themselves."""
    config.write_text('dir = "a$b/$${HOME}/$"\n')
    assert load(config, {"HOME": "/root"}).dir == "a$b/${HOME}/$"


def test_references_are_for_files_only() -> None:
    """Variables and keywords are taken literally, since whoever sets them can look up a variable."""
    assert load(environment={"TIDELOG_DIR": "${HOME}", "HOME": "/root"}).dir == "${HOME}"
    assert load(environment={"HOME": "/root"}, dir="${HOME}").dir == "${HOME}"


def test_an_unset_reference_is_named(config: Path) -> None:
    """A reference to a variable that is not set is an error that names both, and not an empty text."""
    config.write_text('[vault]\nsecret_key = "${NOT_THERE}"\n')
    message = str(load_error(config))
    assert "[vault] secret_key needs the environment variable NOT_THERE, which is not set" in message


def test_a_reference_without_a_name(config: Path) -> None:
    """A `${...}` that names no variable is an error and does not repeat what is in it."""
    config.write_text(f'[vault]\nsecret_key = "${{{PASSWORD}}}"\n')
    message = str(load_error(config))
    assert "secret_key has a ${...}" in message
    assert PASSWORD not in message


def test_secrets_are_not_shown(config: Path) -> None:
    """A secret is there for whoever asks for it and in no printed form of the settings."""
    config.write_text('[vault]\nsecret_key = "${KEY}"\n')
    for settings in (
        load(config, {"KEY": PASSWORD}),
        load(environment={"TIDELOG_SECRET_KEY": PASSWORD}),
        load(secret_key=PASSWORD),
        load(secret_key=Secret(PASSWORD)),
    ):
        assert settings.vault.secret_key == Secret(PASSWORD)
        assert settings.vault.secret_key.reveal() == PASSWORD
        printed = f"{settings!r} {settings} {settings.vault} {describe(settings)} {settings.__rich_repr__()}"
        assert PASSWORD not in printed
        assert describe(settings)["secret_key"] == "***"


def test_values_out_of_references_are_not_shown(config: Path) -> None:
    """What came out of the environment by reference may be a secret, so it is not printed either."""
    config.write_text('dir = "${PLACE}"\n')
    settings = load(config, {"PLACE": PASSWORD})
    assert settings.dir == PASSWORD
    assert PASSWORD not in f"{settings!r} {describe(settings)} {settings.__rich_repr__()}"
    assert "dir='***'" in repr(settings)


def test_an_override_of_a_reference_is_shown_again(config: Path) -> None:
    """Only the value that is in force decides whether it is hidden."""
    config.write_text('dir = "${PLACE}"\n')
    assert describe(load(config, {"PLACE": PASSWORD}, dir="plain"))["dir"] == "plain"


@pytest.mark.parametrize(
    "text",
    [
        'secret_key = ["correct horse battery staple"]',
        'fsync_interval_ms = "${KEY}"',
        'verify = "${KEY}"',
        'mode = "${KEY}"',
        'attempts = "${KEY}"',
    ],
)
def test_errors_do_not_show_secrets(config: Path, text: str) -> None:
    """An error about a value that must not be seen shows *** instead, in its whole traceback."""
    config.write_text(text)
    error = load_error(config, {"KEY": PASSWORD})
    assert "not ***" in str(error)
    assert error.__context__ is None
    assert PASSWORD not in "".join(traceback.format_exception(error))


def test_a_secret_resists_accidents() -> None:
    """A secret prints as ***, cannot become JSON, and still compares and travels to other processes."""
    secret = Secret(PASSWORD)
    assert f"{secret} {secret!r} {[secret]}" == "*** *** [***]"
    with pytest.raises(TypeError):
        msgspec.json.encode(secret)
    assert pickle.loads(pickle.dumps(secret)) == secret
    assert {secret, Secret(PASSWORD)} == {secret}
    assert secret != PASSWORD


def test_names_are_unique_over_all_tables() -> None:
    """Two tables that use one name are found when the program starts, not when somebody sets it."""

    class Twice(Settings, frozen=True, kw_only=True):
        again: LogSettings = msgspec.field(default_factory=LogSettings)

    with pytest.raises(AssertionError, match="two settings are called fsync_interval_ms"):
        settings_of(Twice)


def test_every_setting_can_be_described() -> None:
    """The description has every setting of every table under its own name."""
    tables = (LogSettings(), TierSettings(), store_settings.StoreSettings(), store_settings.MetadataSettings())
    names = {"dir", "store", "metadata", "metadata_root", "lease_seconds"}.union(*map(msgspec.structs.asdict, tables))
    assert set(describe(Settings())) == names


def test_replicas_have_settings_of_their_own_in_a_file(tmp_path: Path) -> None:
    """In a table for each URL, with secrets from the environment, which nothing shows; a variable has the same as
    JSON."""
    file = tmp_path / "tidelog.toml"
    file.write_text(
        '[object_store]\nstore_region = "eu-central-1"\n'
        '[object_store.replica_stores."s3://second"]\n'
        'store_region = "eu-north-1"\nstore_access_key_id = "id"\nstore_secret_access_key = "${SECOND}"\n'
    )
    settings = load_settings(file, {"SECOND": "PLANTED"})
    own = (settings.object_store.replica_stores or {})["s3://second"]
    assert (own.store_region, own.store_secret_access_key) == ("eu-north-1", Secret("PLANTED"))
    assert "PLANTED" not in repr(settings)
    text = '{"s3://b": {"store_secret_access_key": "PLANTED", "store_region": "x"}}'
    given = load_settings(None, {"TIDELOG_REPLICA_STORES": text})
    assert (given.object_store.replica_stores or {})["s3://b"].store_region == "x"
    assert "PLANTED" not in repr(given)
    for wrong in (text.replace("store_region", "region"), text[1:]):
        with pytest.raises(ConfigError, match="must be a table of tables") as refused:
            load_settings(None, {"TIDELOG_REPLICA_STORES": wrong})
        assert "PLANTED" not in str(refused.value)
