"""Parts of `launch.kinds.kubernetes`: templates of objects, and the kubectl commands for a job."""
