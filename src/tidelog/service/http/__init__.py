"""HTTP beside Kafka's protocol: a table of routes (`routes.py`), the application that serves it (`app.py`), and one
module of handlers per noun. `server.py` listens."""
