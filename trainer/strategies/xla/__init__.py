"""What the strategy `xla_spmd` consists of: all of it needs torch-xla."""
