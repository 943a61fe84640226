"""Training: settings, losses, trainers, and whole runs of reward models and of experts."""
