"""Settings: a TOML file, then TIDELOG_* variables, then keyword arguments; the later one wins.

Invariants
- Each setting has one name, unique over all tables: `fsync_interval_ms` in the file (in its table or at the top level),
  `TIDELOG_FSYNC_INTERVAL_MS` in the environment, `fsync_interval_ms=` as a keyword. Those of an engine say so in the
  environment: `TIDELOG_ENGINE_PAGE_SIZE`.
- What is not known is an error, never ignored, and the error suggests the nearest known name.
- What a setting accepts is said once, by its type where it is declared, with the component it belongs to.
- A value that came out of `${NAME}` in the file, or whose type is `Secret`, is in no error, no `describe` and no repr.
"""

from tidelog.config.load import InForce, explain_settings, load_as, load_engine_config, load_settings
from tidelog.config.settings import EngineConfig, Settings, describe

__all__ = [
    "EngineConfig",
    "InForce",
    "Settings",
    "describe",
    "explain_settings",
    "load_as",
    "load_engine_config",
    "load_settings",
]
