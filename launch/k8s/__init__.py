"""Parts of `launch.kubernetes`: templates of objects, and the kubectl commands for a job."""
