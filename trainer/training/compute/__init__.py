"""How a model is computed: compiled layers, fp8, fused attention, the size of a micro-batch."""
