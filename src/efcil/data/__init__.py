"""Where images come from, how classes become tasks, and how batches are augmented."""
