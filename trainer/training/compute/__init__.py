"""How a model is computed: compiled layers, fp8, attention, micro-batch size, arithmetic."""
