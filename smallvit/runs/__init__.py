"""Run folders: their files, and loading, scoring and predicting with the trained model."""
