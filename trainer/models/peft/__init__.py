"""Parameter-efficient fine-tuning: `model.peft: {kind: lora}` is the module `lora`.

A module's `Config` is a `trainer.models.Peft`: it adds parameters to a built model. Only these, a
task's head and, for some kinds, norms are trained; all else is frozen.
"""
