"""Elastic runs: agents that join a rendezvous, start workers, and restart them after failures."""
