"""From two files to a job: what is submitted, whether it would start, and its code."""
