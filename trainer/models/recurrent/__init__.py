"""LSTMs: layers, characters, and the models and heads made of them."""
