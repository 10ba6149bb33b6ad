"""Tokenizers, and what prepares text for them."""
