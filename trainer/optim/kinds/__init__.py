"""What `kind` chooses of `trainer.optim`: each module here is one."""
