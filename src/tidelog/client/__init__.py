"""What `tidelog.connect` returns: the names of an embedded log, over the network."""
