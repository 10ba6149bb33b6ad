"""What `kind` chooses of `trainer.accelerators`: each module here is one."""
