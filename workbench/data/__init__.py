"""Data: Croissant manifests with hashes, data sets, and a loader that resumes at the exact sample."""
