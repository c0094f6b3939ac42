"""Transactions: locks, read sets, write sets."""
