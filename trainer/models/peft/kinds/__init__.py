"""What `kind` chooses of `trainer.models.peft`: each module here is one."""
