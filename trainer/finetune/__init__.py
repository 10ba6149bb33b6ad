"""Fine-tuning on many tasks: each run is an experiment like any other.

Here they are made, run and compared.
"""
