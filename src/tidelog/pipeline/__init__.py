"""Spark reads and writes topics, and runs the jobs on them.

Importing this package imports neither Spark nor Arrow: the code that runs on executors lies in it too, and a command
line that only asks for help passes through it. What it offers is loaded when it is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tidelog.pipeline.cluster_package import cluster_settings, pack_for_cluster
    from tidelog.pipeline.engine_jobs.checkpoint import checkpoint_engine
    from tidelog.pipeline.engine_jobs.compact import compact_engine
    from tidelog.pipeline.engine_jobs.cost import engine_cost
    from tidelog.pipeline.engine_jobs.digest import digest_engine
    from tidelog.pipeline.engine_jobs.gc import apply_engine_gc, plan_engine_gc
    from tidelog.pipeline.engine_jobs.replay import replay_engine
    from tidelog.pipeline.engine_jobs.replay_topic import replay_engine_to_topic
    from tidelog.pipeline.engine_jobs.restore import restore_engine_directory
    from tidelog.pipeline.engine_jobs.verify import verify_engine
    from tidelog.pipeline.engines.place import EngineRoot, find_engine
    from tidelog.pipeline.jobs.table_reader import read_table
    from tidelog.pipeline.listener import LagListener
    from tidelog.pipeline.root import Root, find_root
    from tidelog.pipeline.session import register, spark_session

__all__ = [
    "EngineRoot",
    "LagListener",
    "Root",
    "apply_engine_gc",
    "checkpoint_engine",
    "cluster_settings",
    "compact_engine",
    "digest_engine",
    "engine_cost",
    "find_engine",
    "find_root",
    "pack_for_cluster",
    "plan_engine_gc",
    "read_table",
    "register",
    "replay_engine",
    "replay_engine_to_topic",
    "restore_engine_directory",
    "spark_session",
    "verify_engine",
]

_HOMES = {
    "EngineRoot": "tidelog.pipeline.engines.place",
    "find_engine": "tidelog.pipeline.engines.place",
    "apply_engine_gc": "tidelog.pipeline.engine_jobs.gc",
    "plan_engine_gc": "tidelog.pipeline.engine_jobs.gc",
    "replay_engine": "tidelog.pipeline.engine_jobs.replay",
    "replay_engine_to_topic": "tidelog.pipeline.engine_jobs.replay_topic",
    "restore_engine_directory": "tidelog.pipeline.engine_jobs.restore",
    "compact_engine": "tidelog.pipeline.engine_jobs.compact",
    "checkpoint_engine": "tidelog.pipeline.engine_jobs.checkpoint",
    "digest_engine": "tidelog.pipeline.engine_jobs.digest",
    "engine_cost": "tidelog.pipeline.engine_jobs.cost",
    "verify_engine": "tidelog.pipeline.engine_jobs.verify",
    "LagListener": "tidelog.pipeline.listener",
    "Root": "tidelog.pipeline.root",
    "find_root": "tidelog.pipeline.root",
    "pack_for_cluster": "tidelog.pipeline.cluster_package",
    "cluster_settings": "tidelog.pipeline.cluster_package",
    "read_table": "tidelog.pipeline.jobs.table_reader",
    "register": "tidelog.pipeline.session",
    "spark_session": "tidelog.pipeline.session",
}


def __getattr__(name: str) -> object:
    """A public name, from the module that has it."""
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
