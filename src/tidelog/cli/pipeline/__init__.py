"""`tidelog pipeline`: the Spark jobs, one module per kind."""
