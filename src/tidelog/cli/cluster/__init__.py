"""`tidelog cluster`: the commands about several nodes."""
