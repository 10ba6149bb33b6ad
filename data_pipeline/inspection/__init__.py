"""Statistics and examples of a built dataset."""
