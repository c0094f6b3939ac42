"""Verification of an engine's files, state and store."""
