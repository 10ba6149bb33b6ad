"""The parts of the cluster kind `cloud_tpu`."""
