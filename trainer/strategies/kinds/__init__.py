"""What `kind` chooses of `trainer.strategies`: each module here is one."""
