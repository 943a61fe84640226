"""Training: settings, losses, the trainer, and whole runs of reward models and experts."""
