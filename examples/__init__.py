"""Scripts that show samestep at work. `make demo` runs `demo`."""
