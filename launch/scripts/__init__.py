"""Launch scripts to read, edit and run without `samestep launch`, and what writes them."""
