"""Scripts that reproduce published figures; docs/published.md has their results."""
