"""Parts of a run: policy, session, sampling, evaluation, checkpoints, export."""
