"""Kafka's messages, one module per API, made by `generate.py` when the package is built. `codec.py` loads them."""
