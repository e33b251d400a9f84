"""How good a run is: pure functions of predictions and accuracy matrices."""
