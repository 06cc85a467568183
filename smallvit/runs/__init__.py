"""What a run folder is: its names, the trained model in it, scoring that model and predicting with it."""
