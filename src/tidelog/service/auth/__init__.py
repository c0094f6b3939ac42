"""Security of `tidelog serve`: who connects, what they may do (`access`), and the record of it."""
