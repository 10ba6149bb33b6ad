"""What `kind` chooses of `data_pipeline.dedup`: each module here is one."""
