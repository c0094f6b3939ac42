"""One declared pipeline: `pipeline.toml`, what is due, one run after the other, and their reports."""
