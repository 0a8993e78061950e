"""What a run tells: metrics, files and views, all derived from its events."""
