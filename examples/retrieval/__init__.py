"""Retrieval beside other libraries, and what fine-tuning a published model yields."""
