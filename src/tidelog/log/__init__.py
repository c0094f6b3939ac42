"""The log core: frames, files, writer, readers. Payloads are opaque here."""

from tidelog.log.log import Log
from tidelog.log.reader import Position
from tidelog.log.settings import LogSettings

__all__ = ["Log", "LogSettings", "Position"]
