"""What looks at a run, or changes its course."""
