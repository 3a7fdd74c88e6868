"""What leaked: kinds of data and their metrics, assignment to the originals, intervals and floors.

Nothing is imported here, so that the catalog, the intervals and the modalities can be read without loading torch.
"""
