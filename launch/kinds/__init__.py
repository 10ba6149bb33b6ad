"""What `kind` chooses of `launch`: each module here is one."""
