"""Jobs over the data that an engine has in its store; modules named *_tasks run on executors."""
