"""The format of datasets on disk: shards and their manifest."""
