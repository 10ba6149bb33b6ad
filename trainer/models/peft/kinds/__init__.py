"""The kinds of parameter-efficient fine-tuning: each module is a value of `model.peft.kind`."""
