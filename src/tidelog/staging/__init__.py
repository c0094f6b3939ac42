"""Staging: rows written to a topic by processes that do not own it, and their ingest by its owner.

Imports cold, store, log.
"""
