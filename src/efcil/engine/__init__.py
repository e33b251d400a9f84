"""The engine: one training loop, its optimisers, its data feed and its checkpoints."""
