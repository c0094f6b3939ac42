"""`tidelog engine`: one module per kind of command."""
