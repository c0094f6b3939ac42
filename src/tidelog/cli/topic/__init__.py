"""`tidelog topic`: one module per kind of command."""
