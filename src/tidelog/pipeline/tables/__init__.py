"""Topics as Parquet and Iceberg tables."""
