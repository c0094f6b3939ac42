"""Spark data sources: topics, an engine's log as rows, and its objects as of a seq.

Importing this package imports neither Spark nor Arrow.
"""
