"""Idempotent producers and transactions: pure state machines, their coordinator, and what is stored."""
