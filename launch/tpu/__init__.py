"""What the cluster kind `cloud_tpu` consists of."""
