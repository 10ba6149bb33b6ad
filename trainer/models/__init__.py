"""Models: one Transformer core and the families configured from it; `kind: bert` is the module `bert`.

A family's `Config.build_base()` makes the module, and `build()` adds what `peft` says; best under
`torch.device("meta")`, as parameters get their values afterwards, from `initial_values` or a checkpoint. Besides
`forward` a model offers `sharding_units()`, `stacked()`, `flops_per_token()`, `max_sequence_length` and
`initial_values()`; one that writes text also `start()` and `step()`. A `Config` with a setting `head` builds models for
tasks, too. Parameter names are the names in checkpoints; those of heads begin with `head.`.
"""
