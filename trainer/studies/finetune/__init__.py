"""Fine-tuning suites: many tasks, settings and seeds; each run is an ordinary experiment."""
