"""What `kind` chooses of `trainer.objectives`: each module here is one."""
