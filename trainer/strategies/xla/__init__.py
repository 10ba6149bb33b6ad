"""The parts of the strategy `xla_spmd`, which need torch-xla."""
