"""Engines as Spark sees them: where one is, its log as rows, and its objects as of a seq.

Importing this package imports neither Spark nor Arrow.
"""
