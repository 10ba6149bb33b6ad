"""Scores of retrieval: collections in BEIR's layout, exact search, measures of rankings."""
