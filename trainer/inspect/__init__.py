"""Commands around a run: checks before it, tools for its checkpoints, audits after it."""
