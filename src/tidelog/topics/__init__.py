"""Topics: messages, producers, subscriptions, over one log and the cold tier."""
