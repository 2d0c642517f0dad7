"""What a run is made of: session, sampling, evaluation, checkpoints, export."""
