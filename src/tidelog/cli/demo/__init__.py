"""`tidelog demo`: the whole product in a minute."""
