"""From two files to a job: its submission, whether it would start, and its code."""
