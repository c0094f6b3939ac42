"""Idempotent producers and the deduplication of their sequences."""
