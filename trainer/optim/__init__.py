"""Optimizers (each module defines a `Config` that builds one), parameter groups and learning-rate schedules."""
