"""Settings: a TOML file, then TIDELOG_* variables, then keyword arguments; the later one wins.

Invariants
- One thing has one name, for topics and for engines: `rotate_max_bytes` in the file (in its table or, a topic's, at the
  top level), `TIDELOG_ROTATE_MAX_BYTES` in the environment, `rotate_max_bytes=` as a keyword. An engine's have a table
  of their own, and a prefix in the environment: `TIDELOG_ENGINE_ROTATE_MAX_BYTES`.
- Aliases (`wal_segment_size`) are accepted wherever the name is. One source that gives both is refused.
- An unknown setting is an error, never ignored, and the error suggests the nearest known name.
- The values a setting accepts are declared once, by its type, in the component it belongs to.
- A value that came from `${NAME}` in the file, or whose type is `Secret`, appears in no error, no `describe` and no
  repr.
"""

from tidelog.config.load import (
    EngineConfig,
    InForce,
    Settings,
    describe,
    explain_settings,
    load_as,
    load_engine_config,
    load_serve_settings,
    load_settings,
)

__all__ = [
    "EngineConfig",
    "InForce",
    "Settings",
    "describe",
    "explain_settings",
    "load_as",
    "load_engine_config",
    "load_serve_settings",
    "load_settings",
]
