"""Spark sessions: finds Java, applies defaults, and starts quickly."""
