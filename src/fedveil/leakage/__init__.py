"""What leaked: metrics of reconstructed images, their assignment to the originals, intervals and floors.

Nothing is imported here, so that `fedveil.leakage.catalog` can be read without loading torch.
"""
