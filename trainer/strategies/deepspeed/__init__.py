"""Parts of `trainer.strategies.kinds.deepspeed`."""
