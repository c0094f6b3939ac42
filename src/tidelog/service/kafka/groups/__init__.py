"""Consumer groups of both protocols and share groups: pure state machines, their coordinator, and what is stored."""
