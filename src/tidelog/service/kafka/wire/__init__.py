"""Kafka's messages, one module per API, made by `scripts/kafka_codec` in the build. `codec.py` loads them."""
