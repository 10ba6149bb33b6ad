"""The programs of clusters (kubectl, gcloud, sbatch, ...), as `launch` calls them."""
