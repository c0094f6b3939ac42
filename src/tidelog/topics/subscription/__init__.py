"""Subscriptions: delivery, cursors and dead letters."""
