"""Topics whose partitions several nodes serve: any node answers, and asks the others."""
