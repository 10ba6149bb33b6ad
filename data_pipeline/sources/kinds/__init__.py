"""What `kind` chooses of `data_pipeline.sources`: each module here is one."""
