"""Formats of compacted data in the store: sorted files, blob files, indexes and snapshots."""
