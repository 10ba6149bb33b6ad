"""The global order of examples."""
