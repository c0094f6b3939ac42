"""The engine's write-ahead log: its records, its files, its replay and its ship watermark."""
