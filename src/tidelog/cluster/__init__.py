"""Several nodes that serve one installation: membership, placement, failover and balance, agreed on in etcd."""
