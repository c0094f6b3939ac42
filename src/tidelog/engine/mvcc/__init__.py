"""Multi-version concurrency control: how entries create versions, and how retention and vacuum remove them."""
