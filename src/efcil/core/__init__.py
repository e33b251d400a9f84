"""The mathematics of the methods: pure functions on tensors, without input or output, state or hidden randomness."""
